"""When a checkpoint exists: attempts, claim, commit, removal; the transaction that makes one.

`transaction.py` takes all ranks through the steps of `commit_protocol.py`. `attempts.py` reads and
writes `index.json`, the one file that decides. `removal.py` removes attempts. `records/` is for
records next to the checkpoints in a root.
"""
