"""A state as a tree of leaves."""
