"""The writer process: `python -m dist_ckpt.async_save.writer`.

`process.py` is its main loop: it listens to its trainer (`messages.py`), and outlives it until what
was staged is settled. `write_jobs.py` carries one save after another out, logs and reports each.
"""
