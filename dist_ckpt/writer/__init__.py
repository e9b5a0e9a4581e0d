"""The other process of a background save: `python -m dist_ckpt.writer`.

`process.py` is its main loop: it listens to its trainer (`messages.py`), and outlives it until what
was staged is settled. `saves.py` carries one save after another out, logs and reports each.
"""
