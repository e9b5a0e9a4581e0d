"""Write shard files and objects files from memory, or link those of an earlier save.

- Bytes, digests and threads of a new file: `shard_writer.py`.
- `link_unchanged` of a save: `link_unchanged.py`. Files of another checkpoint: `copy_files.py`.
"""
