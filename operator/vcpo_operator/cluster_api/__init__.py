"""The Kubernetes API: the client, the executor of actions."""
