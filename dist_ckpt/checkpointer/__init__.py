"""A run's checkpoints, from the first save to the last resume.

`when.py` says when one is saved; `runs/keep.py` says which are kept.
"""
