"""Runs as they are watched from outside: `vcpo top`, `vcpo events`, `vcpo logs`."""
