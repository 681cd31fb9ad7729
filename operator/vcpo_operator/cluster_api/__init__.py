"""The Kubernetes API: the only client, the executor of actions, the leader lease."""
