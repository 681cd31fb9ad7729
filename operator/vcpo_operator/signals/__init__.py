"""The learner's signals: asked for by gRPC, or read from a Prometheus."""
