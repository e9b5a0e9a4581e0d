"""A state as a tree of leaves.

- A new class of leaf, or object in a state: `_leaf` in `state_tree.py`.
- A class of dict or list: `containers.py`. Its values: `core/format/objects/plain_types.py`.
"""
