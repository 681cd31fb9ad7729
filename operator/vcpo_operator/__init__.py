"""The Kubernetes operator's package; it loads neither torch nor vLLM."""
