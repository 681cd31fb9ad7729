"""The engine for throughput: vLLM, in processes of its own."""
