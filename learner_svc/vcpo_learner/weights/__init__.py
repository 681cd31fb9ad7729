"""Policy versions and their files: the store, deltas."""
