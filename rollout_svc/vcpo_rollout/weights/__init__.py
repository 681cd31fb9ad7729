"""Brings a published version from its files into the engine."""
