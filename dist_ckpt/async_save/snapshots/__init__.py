"""Snapshots in shared memory: staged, sealed, found and read again.

A trainer stages a snapshot into an arena, its writer seals it (`arena.py`); `arena_layout.py` says
where everything lies, `job_folder.py` where arenas do, `root_id.py` whose they are. After the
trainer's end `recovered_snapshots.py` finds what is whole, and `memory_source.py` lets a load read
files from there.
"""
