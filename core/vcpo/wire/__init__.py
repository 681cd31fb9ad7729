"""The gRPC contract between learner, rollout workers and whoever steers a run."""
