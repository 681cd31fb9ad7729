"""Shared code of every service process: start and stop, locks, and the cause of a crash."""
