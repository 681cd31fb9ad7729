"""Which of transformers' families are sampled, measured and trained right; `__main__` says how."""
