"""Decide which rank writes and reads which bytes. Pure functions.

- `plan.py`: what planners take and return, and views of a tensor (mesh, placements). `mesh.py`: the
  cells that a view gives to a rank. A new kind of parallelism begins in these two. A new kind of
  view also needs a branch in `merge_ownership` of `save/inventories.py`, which takes others as
  whole.
- `save/`: `save/inventories.py` merges the inventories of the ranks, `save/balance.py` chooses the
  rank that stores a replica.
- `load/`: `load/load_planner.py` is all of resharding, `load/read_sharing.py` shares reads.
- `selection.py`: `include` and `exclude`. `sharding_config.py`: `dc.ShardingConfig`, and the views
  that it gives to a checkpoint. `state/sharding_rules.py` applies it to a state.
"""
