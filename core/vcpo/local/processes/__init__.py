"""The processes of a local run: the learner, its workers, their GPUs, and whether they answer."""
