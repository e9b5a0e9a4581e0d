"""Shard files and objects files out of memory, or linked from an earlier save."""
