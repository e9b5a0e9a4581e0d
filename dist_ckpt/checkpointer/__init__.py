"""A run's checkpoints: when one is saved, by what ranks agree on it, and what a run goes on from.

`checkpointer.py` is the front door, `run_session.py` what happens at a boundary. `save_policy.py`
has the policies, as plain values; `checkpointer/coordination/barrier_rounds.py` is how ranks agree,
and `checkpointer/coordination/barrier_rounds.py` does it.
"""
