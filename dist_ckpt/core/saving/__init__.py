"""`dc.save`: agree, write, receipts, verdict.

`save.py` has the steps: `local_save_state.py` says what this rank holds, `agreement.py` agrees on a
plan, `transaction.py` claims, writes and commits. Background saves go the same way, in two
processes: see `dist_ckpt.async_save.trainer`.
"""
