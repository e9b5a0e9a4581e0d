"""A checkpoint made of another one: reshard, copy, backup, strip.

How one layout becomes another is in `dist_ckpt.core.planning.load.load_planner`; `reshard.py` only
applies it to a whole checkpoint.
"""
