"""`dc.save`: read the state, agree on a plan, write; carry over the rest of a checkpoint.

`save.py` has the steps: `local_save_state.py` reads the state of this rank, `agreement.py` agrees
on a plan, `core/commit/transaction.py` claims, writes and commits. Background saves go the same
way, in two processes: see `dist_ckpt.async_save.trainer`.
"""
