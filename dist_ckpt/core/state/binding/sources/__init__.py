"""One or several checkpoints, under the names of the state. Pure.

The names of a checkpoint: `saved_tree.py`; of several: `multi_source.py`. `rename`: `rename.py`.
"""
