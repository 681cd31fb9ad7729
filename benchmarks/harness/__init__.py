"""Models, behavior policies and estimators that several benchmarks share."""
