"""What background saves leave in shared memory, and how it is found and read again.

A trainer stages a snapshot into an arena, its writer seals it (`arena.py`); `arena_layout.py` says
where everything lies, `job_folder.py` where arenas do, `root_id.py` whose they are. After the
trainer's end `kept.py` finds what is whole, and `kept_files.py` lets a load read files from there.
"""
