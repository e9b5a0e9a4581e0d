"""Files of other systems in and out: as functions, and as `dist-ckpt import` and `export`.

A format is a module with `import_file` and `export_file`, and a line in `cli/formats.py`. What it
reads becomes a checkpoint by `plain_states.py` and `lone_save.py`.
"""
