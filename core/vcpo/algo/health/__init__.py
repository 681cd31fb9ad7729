"""Health of training: diagnostics, mismatch audit, early warning of a collapse, collapses."""
