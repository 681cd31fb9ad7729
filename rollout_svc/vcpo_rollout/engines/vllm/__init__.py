"""The engine for throughput: vLLM in its own processes."""
