"""Read blocks of shard files into memory.

- The checks of files before anything is changed: `open_files.py`.
- The blocks that a load needs, and the size of each read: `read_grouping.py`.
- The execution of these reads, with digests: `block_reader.py`.
- Reads of a stored checkpoint as the source of another one: `read_windows.py`.
"""
