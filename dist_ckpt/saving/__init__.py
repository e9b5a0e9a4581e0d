"""`dc.save`: agree, write, receipts, verdict.

`save.py` has the steps: `held_state.py` says what this rank holds, `agreement.py` agrees on a plan,
`attempt_run.py` claims, writes and commits. Background saves go the same way, in two processes:
see `dist_ckpt.background`.
"""
