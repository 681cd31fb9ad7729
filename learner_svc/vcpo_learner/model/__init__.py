"""The policy's tensors and files: loading, LoRA, checkpoints, exported folders."""
