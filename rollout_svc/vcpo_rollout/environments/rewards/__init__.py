"""Rewards that are shipped, for `environment.rewards`."""
