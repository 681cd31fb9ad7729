"""Cells: one training run of the grid each, run in a process of its own and kept in a file."""
