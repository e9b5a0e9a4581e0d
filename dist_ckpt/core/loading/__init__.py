"""`dc.load`: open, check, read, place; `dc.build`; `dc.from_bytes`.

- A step of a load, the read of all blocks: `load.py`.
- An option, or several sources: `load_options.py`.
- The check of one rank before anything is read: `check_load.py`.
- A message between ranks, a decision of the coordinator: `load_decisions.py`.
- Reads that ranks share: `shared_read/`. Reads of one rank: `core/shard_io/read/`.
- Which memory is filled: `core/state/binding/`.
"""
