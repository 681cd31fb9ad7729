"""Policy versions on the event loop: the store, deltas, the archive, peer assignment."""
