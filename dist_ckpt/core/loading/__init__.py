"""`dc.load`: open, check, read, place; `dc.build`.

`load.py` has the steps, `load_options.py` the options. `check.py` has the work of one rank before
anything is read, `load_messages.py` the messages and the decisions of the coordinator.
`shared_read.py` and `shared_read_group.py` let one rank read what several ranks need.
`core/state/binding` decides which memory is filled, `core/shard_io/read` reads the blocks.
"""
