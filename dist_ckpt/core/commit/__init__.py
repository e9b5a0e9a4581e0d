"""When a checkpoint exists: attempts, claim, commit, removal.

`commit_protocol.py` is the order that a crash may break anywhere, `attempts.py` reads and puts
`index.json`, the one file that decides, `removal.py` says how attempts go, `outcome.py` what became
of one after an error. `commit/records/record_store.py` is about what lies beside checkpoints in
their root.
"""
