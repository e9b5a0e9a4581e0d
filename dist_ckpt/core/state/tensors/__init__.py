"""Tensors of every kind: plain, DTensor, subclasses made of others."""
