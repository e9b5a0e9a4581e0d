"""`dc.AsyncSaver`: the trainer's side of background saves, and restore.

A save: `save.py` agrees and plans, `staging.py` copies into an arena (from CUDA devices beside the
training: `dist_ckpt.memory.cuda`), and the writer is told through `writer_client.py`. That is
another process, `dist_ckpt.writer`, which goes on alone if the trainer dies. The next run settles
with it (`former_writers.py`) and takes back what lies in memory (`restore.py`).
"""
