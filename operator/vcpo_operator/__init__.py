"""The Kubernetes operator; it loads neither torch nor vLLM."""
