"""What several benchmarks stand on: models, samplers and estimators of their own."""
