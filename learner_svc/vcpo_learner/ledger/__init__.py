"""The event loop's records: leases, groups, workers, and the account of each trajectory."""
