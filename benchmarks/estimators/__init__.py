"""How good the estimates are: gradient norms, baselines, effective sample sizes, warnings."""
