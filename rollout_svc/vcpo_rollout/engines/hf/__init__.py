"""The engine that runs on any machine: `transformers` with continuous batching, in one thread."""
