"""Who writes and reads which bytes: decided, not done. Pure.

- names: `selection.py` is `include` and `exclude`;
- words: `plan.py` has what planners take and return, and the views of a tensor (mesh, placements);
  `mesh.py` says which cells a view gives to a rank. A new kind of parallelism begins in these two;
  `state/tensors/read_tensor.py` reads it off tensors. A new kind of view needs its branch in
  `holders.merge_ownership` as well, which takes others as whole;
- saves: `planning/save/inventories.py` and `planning/save/ownership.py` find who holds what,
  `planning/save/balance.py` chooses which of the holders stores it, `planning/save/save_planner.py`
  puts the plan together, `write_batches.py` a rank's writes;
- loads: `planning/load/load_planner.py` is all of resharding, `planning/load/read_sharing.py` who
  fetches what several want;
- `sharding_config.py` is `dc.ShardingConfig`; `sharded_views.py` applies it to what is stored, and
  `state/sharding_rules.py` to a state.
"""
