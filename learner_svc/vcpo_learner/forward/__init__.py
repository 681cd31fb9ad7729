"""The model's forward passes, in tensors: token batches, log-probabilities, gradient norms."""
