"""A state as a tree of leaves.

A new class of leaf, or object in a state: `state_tree.py`. Dicts and lists: `containers.py`.
"""
