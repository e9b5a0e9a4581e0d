"""When a checkpoint exists: attempts, claim, commit, removal; the transaction that makes one.

- The steps of all ranks: `transaction.py`. Every new checkpoint goes through it.
- A check of the path before a save writes anything: `claim` in `commit_protocol.py`.
- A check of the free space: `Transaction.check_room` in `transaction.py`.
- A log for every commit: `commit` in `commit_protocol.py`; on all ranks: `Transaction.report`.
- The index, which decides what is a checkpoint: `attempts.py`. Its tables of files: `receipts.py`.
- How stale attempts are cleaned up: `remove_garbage` in `removal.py`.
- Pins, tags, leases and incarnations: `records/`.
"""
