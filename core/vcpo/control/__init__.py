"""Pure decisions about a run: admission of work, number of workers, conditions, limits of a run.

The local host and the operator both use this package. It reads no clock, service or file.
"""
