"""Records of a run: its steps, events and evaluations, skipped steps, and exported models."""
