"""Which rank runs which trajectories, and how many tokens at a time."""
