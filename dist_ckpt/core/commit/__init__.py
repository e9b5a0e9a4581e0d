"""When a checkpoint exists: attempts, claim, commit, removal.

`commit_protocol.py` has the steps and their order. `attempts.py` reads and writes `index.json`, the
one file that decides. `removal.py` removes attempts. `outcome.py` finds the state of an attempt
after an error. `records/record_store.py` is for records next to the checkpoints in a root.
"""
