"""The gRPC contract between learner, rollout workers and the host of a run."""
