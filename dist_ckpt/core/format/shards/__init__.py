"""Shard files: safetensors with a table of what lies where."""
