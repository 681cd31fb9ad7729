"""Rollout workers: sample trajectories with the newest policy they hold, and score them."""
