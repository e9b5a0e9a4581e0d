"""Saves in the background: the trainer's side, the writer process, snapshots in memory.

A trainer stages (copies) its files into an arena in shared memory. The files are a snapshot. Its
writer, one process a rank, writes the snapshot and commits it with the writers of all ranks.

- If a trainer dies, its writer settles complete snapshots, fails incomplete ones, and ends.
- If a writer dies, its unsettled saves fail. The next save starts another writer.
- If both die, named arenas stay in the job folder in /dev/shm. The next run restores from them.
- If the host or container ends, all memory is lost: load the newest checkpoint from storage.

`dc.AsyncSaver` and its options: `async_saver.py`. A restore from memory: `memory_restore.py`.
"""
