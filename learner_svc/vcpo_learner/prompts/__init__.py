"""Which prompt is trained on next: in order, or the one with the most to learn from."""
