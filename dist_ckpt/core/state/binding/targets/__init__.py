"""Memory that a load fills, and tensors that it has to make."""
