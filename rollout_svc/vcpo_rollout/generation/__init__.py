"""The worker's event loop: turns leases into responses, in a single turn or in several."""
