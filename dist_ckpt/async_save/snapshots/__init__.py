"""Snapshots in shared memory: staged, sealed, found and read again.

A trainer stages a snapshot into an arena, and its writer seals it (`arena.py`). `arena_layout.py`
has the layout of an arena, and `job_folder.py` the folder of the arenas of a job. After the
trainer's end, `recovered_snapshots.py` finds complete snapshots, and serves their files to a load.
"""
