"""The state of optimizers, under the names of their parameters."""
