"""Calls over gRPC: to the learner, to other workers, and from them."""
