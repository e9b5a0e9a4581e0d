"""One or several checkpoints, under the names of the state. Pure.

- The names and values of a checkpoint: `saved_tree.py`. The option `rename`: `rename.py`.
- The checkpoint, of several, from which a name comes: `multi_source.py`.
"""
