"""Effective sample size: importance weights, its calibration, and the learning rate it allows."""
