"""Which prompt is trained on next: in order, or by how much there is to learn from it."""
