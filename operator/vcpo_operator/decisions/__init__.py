"""What the operator decides, from records alone: no client, no clock. Pure."""
