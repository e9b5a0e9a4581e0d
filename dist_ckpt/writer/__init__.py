"""The other process of a background save: `python -m dist_ckpt.writer`."""
