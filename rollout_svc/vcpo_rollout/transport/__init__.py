"""The worker's gRPC clients (learner, other workers) and the service it offers to other workers."""
