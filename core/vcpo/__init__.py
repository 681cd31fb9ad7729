"""Variance-controlled policy optimization for asynchronous RL: the torch-free core."""
