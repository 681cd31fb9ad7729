"""What a run writes down: records of steps and events, skipped steps, exported models."""
