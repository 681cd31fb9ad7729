"""The template of a run's pods. Pure."""
