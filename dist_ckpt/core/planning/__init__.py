"""Decide which rank writes and reads which bytes. Pure functions.

- A placement of DTensor, a parallelism: its class and its cells in `tensor_views.py`, and a branch
  in `merge_views` of `save/inventories.py`.
- The rank that stores a replica, the files of a rank, and all else of a save: `save/`.
- Resharding: `load/load_planner.py`. Reads that ranks share: `load/shared_ranges.py`.
- `dc.ShardingConfig`: `sharding_config.py`; a load or a reshard applies it by `target_views` there;
  how a state applies it: `core/state/sharding_rules.py`.
- `include`, `exclude`, `cast`: `name_selection.py`.
"""
