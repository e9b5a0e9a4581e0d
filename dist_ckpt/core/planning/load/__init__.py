"""The load planner: matches stored cells and requested cells.

- How one layout loads into another: `load_planner.py`. Blocks that several ranks need:
  `read_sharing.py`.
"""
