"""A run's checkpoints: when one is saved, by what ranks agree on it, and what a run goes on from.

`checkpointer.py` is the front door, `open_run.py` what happens at a boundary. `when.py` has the
policies, as plain values; `line.py` is how ranks agree, and `rounds.py` does it.
"""
