"""Per-trajectory gradient norms and their weighted sum, from hooks on one backward pass."""
