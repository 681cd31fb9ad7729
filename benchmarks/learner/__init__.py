"""What the learner costs: its update, its host, and what it receives and records."""
