"""What only a GPU can tell: one check for each question, in the order of their weight."""
