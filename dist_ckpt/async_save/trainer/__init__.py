"""The trainer's side of one background save.

`background_save.py` agrees, plans, and copies into an arena. Copies from CUDA devices overlap with
training (`dist_ckpt.core.shard_io.memory.cuda`). `writer_handle.py` sends the job to the writer
process, `dist_ckpt.async_save.writer`, which continues if the trainer dies. The next run ends it
(`job.py`) and restores from memory (`async_save/memory_restore.py`).
"""
