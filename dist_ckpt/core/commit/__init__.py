"""When a checkpoint exists: attempts, claim, commit, removal.

`commit_protocol.py` has the steps and their order. `attempts.py` reads and writes `index.json`, the
one file that decides. `removal.py` removes attempts. `records/` is for records next to the
checkpoints in a root.
"""
