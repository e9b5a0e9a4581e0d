"""`dc.save`, and the transaction through which every new checkpoint is made.

`save.py` has the steps: `local_save_state.py` reads the state of this rank, `agreement.py` agrees
on a plan, `transaction.py` claims, writes and commits. Background saves go the same way, in two
processes: see `dist_ckpt.async_save.trainer`.
"""
