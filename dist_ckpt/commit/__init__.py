"""When a checkpoint exists: attempts, claim, commit, removal.

`order.py` is the order that a crash may break anywhere, `attempts.py` reads and puts `index.json`,
the one file that decides, `removal.py` says how attempts go, `verdicts.py` what became of one
after an error. `root_records.py` is about what lies beside checkpoints in their root.
"""
