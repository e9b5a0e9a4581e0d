"""Snapshots in shared memory: staged, sealed, found and read again.

- A field of a snapshot or a seal: `arena_layout.py`. Increase `VERSION` there.
- How a trainer and its writer share an arena: class `Arena` and class `ArenaReader` in `arena.py`.
- Which arena is overwritten, and memory without a name: class `ArenaPool` in `arena.py`.
- Paths, locks and the default name of a job: `job_folder.py`.
- What an earlier run left in memory, and its files for a load: `recovered_snapshots.py`.
"""
