"""A run's checkpoints: the save policy, the agreement of the ranks, and the resume.

`checkpointer.py` has the public class. `run_session.py` acts at a boundary on which the ranks agree
by `barrier_rounds.py`. `save_policy.py` has the policies, which are values.
"""
