"""Move shards between files and memory, in checked blocks; without ranks. Only `memory/` has torch.

`write/shard_writer.py` writes shards, `read/block_reader.py` reads them. `memory/` has the tensors
on the other end.
"""
