"""The trainer's side of one background save.

A save: `background_save.py` agrees and plans, `staging.py` copies into an arena (from CUDA devices
beside the training: `dist_ckpt.core.shard_io.memory.cuda`), and the writer is told through
`writer_handle.py`. That is another process, `dist_ckpt.async_save.writer`, which goes on alone if
the trainer dies. The next run settles with it (`orphan_writers.py`) and takes back what lies in
memory (`async_save/memory_restore.py`).
"""
