"""The records of the learner's event loop: leases, groups, workers, and the accounting."""
