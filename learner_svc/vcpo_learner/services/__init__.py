"""The learner's gRPC services: thin, typed edges over dispatcher, policy store and signals."""
