"""Studies: a grid of methods, policy lags and seeds on one machine, with an exact lag."""
