"""The learner's reports, by gRPC or from a Prometheus, and the commands to it, by gRPC."""
