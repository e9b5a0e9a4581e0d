"""Checkpoints for multi-GPU PyTorch training."""
