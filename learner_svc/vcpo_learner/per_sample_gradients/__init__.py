"""Per-trajectory gradient norms and their weighted sum, from taps on one backward pass."""
