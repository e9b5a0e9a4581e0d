"""The load planner: matches stored cells and requested cells.

Resharding: `load_planner.py`. Blocks that several ranks need: `shared_ranges.py`.
"""
