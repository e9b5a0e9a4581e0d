"""A run's checkpoints: when one is saved, and which are kept.

`when.py` and `keep.py` are the policies, as plain values, and `policy_text.py` is how they are
written in configuration files and on the command line.
"""
