"""Runs Python that a model wrote, within limits, in its own process."""
