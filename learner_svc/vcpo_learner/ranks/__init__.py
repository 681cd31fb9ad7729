"""Processes that train one model together: their mesh, the sharded model, commands of rank 0."""
