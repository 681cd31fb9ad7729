"""The state of the cluster as small typed records, parsed from the API server's objects. Pure."""
