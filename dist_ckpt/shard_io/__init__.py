"""Shards in and out of files, block by block, checked; without ranks or torch.

In: `shard_writer.write_all`. Out: `open_files.open_files` checks headers before anything is
touched, `block_reader.Reading` carries a load plan out; which blocks, and how much at a time, is in
`block_reads.py`, `small_shards.py` and `reading_work.py`.
"""
