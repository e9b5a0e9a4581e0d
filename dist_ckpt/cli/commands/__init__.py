"""The commands, a file each: parse, call, print.

- A new command: a file with a function of the same name here. Options that several commands have,
  and the output: `cli/`. The work itself: `tools/` or `runs/`.
"""
