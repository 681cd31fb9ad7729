"""Policy versions on their way into the engine: fetched, checked, merged, quantized."""
