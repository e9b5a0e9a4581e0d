"""A checkpoint made of another one: reshard, copy, backup, strip.

`write_plan.py` defines the plan that such a tool returns, and that `--dry-run` prints.
"""
