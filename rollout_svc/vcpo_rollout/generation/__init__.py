"""The worker's event loop: leases turned into responses, in one turn or in several."""
