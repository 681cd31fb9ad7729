"""The learner: leases prompts, trains on what comes back, publishes policy versions."""
