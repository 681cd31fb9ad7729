"""Studies: a grid of methods, policy lags and seeds on one machine, with the lag held exactly."""
