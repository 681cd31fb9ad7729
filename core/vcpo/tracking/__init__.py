"""Copies of a run's numbers for tracking services: TensorBoard, Weights & Biases, one's own."""
