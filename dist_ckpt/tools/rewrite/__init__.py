"""A checkpoint made of another one: reshard, copy, backup, strip.

Each tool first returns a `WritePlan` (`tools/new_files.py`). `--dry-run` prints it.
`WritePlan.run` executes it.

- Another layout, or a part of a checkpoint: `reshard.py`.
- A copy or a backup: `copying.py`.
- Fewer components: `strip.py`. It has no `WritePlan`.
"""
