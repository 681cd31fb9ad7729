"""The policy and its files, in tensors: loading, LoRA, checkpoints, exported folders."""
