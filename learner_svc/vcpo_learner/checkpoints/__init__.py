"""Checkpoints: what a learner needs to resume a run, written beside training."""
