"""Brings a published version from the learner, a peer or the archive into the engine."""
