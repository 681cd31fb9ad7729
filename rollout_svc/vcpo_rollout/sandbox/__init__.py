"""Python that a model wrote, run within limits in a process of its own."""
