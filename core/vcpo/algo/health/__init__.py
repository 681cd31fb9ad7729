"""Health of training: diagnostics of a batch, mismatch audit, early warning of a collapse."""
