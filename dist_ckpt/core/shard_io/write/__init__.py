"""Write shard files and objects files from memory, or link those of an earlier save.

- The files of a rank in a save, and `link_unchanged`: `write_or_link.py`.
- Bytes, digests and threads of new files: `shard_writer.py`.
- Files of another checkpoint: `copy_files.py`.
"""
