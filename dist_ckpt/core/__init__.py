"""Save and load one checkpoint: what `dc.save` and `dc.load` need. No runs, no tools."""
