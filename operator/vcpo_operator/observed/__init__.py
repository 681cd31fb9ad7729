"""What is in the cluster, as slim typed records parsed from the API server's objects. Pure."""
