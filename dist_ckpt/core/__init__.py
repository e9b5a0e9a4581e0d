"""Save and load one checkpoint: what `dc.save` and `dc.load` need. No tools.

The records of runs are here too: annotations and incarnations, in `commit/records/`. The steps of a
save: `saving/`; of a load: `loading/`. When a checkpoint exists: `commit/`. The bytes: `format/`.
"""
