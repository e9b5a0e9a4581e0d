"""Save and load one checkpoint: what `dc.save` and `dc.load` need. No tools.

Of runs it has only the records: annotations and incarnations, in `commit/records/`.
"""
