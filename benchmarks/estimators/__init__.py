"""Benchmarks of estimators: gradient norms, baselines and effective sample sizes."""
