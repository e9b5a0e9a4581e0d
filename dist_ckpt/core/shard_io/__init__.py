"""Move shards between files and memory, in checked blocks; without ranks or torch.

`write/shard_writer.py` writes. `read/open_files.py` checks headers before anything is changed,
`read/block_reads.py` chooses the reads, `read/block_reader.py` runs them.
"""
