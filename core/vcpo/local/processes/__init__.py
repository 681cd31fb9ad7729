"""The processes of a local run: learner and workers, their GPUs, their restarts and liveness."""
