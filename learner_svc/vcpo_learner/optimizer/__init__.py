"""The optimizer: its base learning rate, clipping, and steps at a scaled rate."""
