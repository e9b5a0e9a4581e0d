"""Save and load one checkpoint: what `dc.save` and `dc.load` need. It knows no run and no tool."""
