"""Shared code of every service process: start and stop, locks, logs, and the cause of a crash."""
