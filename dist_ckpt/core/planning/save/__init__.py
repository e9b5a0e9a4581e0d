"""The save planner: inventories of all ranks -> one plan.

- The plan, and the files of each rank: `save_planner.py`.
- Another thing that ranks must agree on: `inventories.py`. Another view: `merge_views` there.
- The rank that stores a replica: `balance.py`.
"""
