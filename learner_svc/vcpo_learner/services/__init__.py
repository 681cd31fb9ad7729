"""The learner's gRPC services: they check messages, and call dispatcher and policy store."""
