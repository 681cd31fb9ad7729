"""What the rollout workers cost: generation, weight sync, late and surplus workers."""
