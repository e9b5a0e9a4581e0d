"""The process that writes in the background: `python -m dist_ckpt.writer`."""
