"""Environments and tasks of the `verifiers` library."""
