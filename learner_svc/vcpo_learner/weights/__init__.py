"""Policy versions on the event loop: stored, encoded as deltas, archived, assigned to peers."""
