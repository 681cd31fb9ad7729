"""What all pods of a run have in common. Pure."""
