"""Saves in the background: the trainer's side, the writer process, snapshots in memory."""
