"""A checkpoint made of another one: reshard, copy, backup, strip.

Each tool first returns a `WritePlan` (`write_plan.py`): `--dry-run` prints it, `run` executes it.

- Another layout, or a part of a checkpoint: `reshard.py`.
- A copy or a backup: `copying.py`.
- Fewer components: `strip.py`. It has no `WritePlan`.
"""
