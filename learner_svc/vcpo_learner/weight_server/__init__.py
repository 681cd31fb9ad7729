"""The process that sends a rank's published weights, beside the event loop that grants leases."""
