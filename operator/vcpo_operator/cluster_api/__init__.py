"""The Kubernetes API: the client, the executor of actions, the leader lease."""
