"""Log-probabilities and gradients of an output head, one tile of its vocabulary at a time."""
