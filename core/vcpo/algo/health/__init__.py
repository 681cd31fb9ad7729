"""The health of training: diagnostics of a batch and early warning of a collapse."""
