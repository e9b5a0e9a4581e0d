"""Shards between files and memory, block by block, checked; without ranks or torch.

In: `shard_writer.write_all`. Out: `open_files.open_files` checks headers before anything is
touched, `block_reader.BlockReader` carries a load plan out; which blocks, and how much at a time,
is in `shard_io/read/block_reads.py` and `shard_io/read/read_work.py`.
"""
