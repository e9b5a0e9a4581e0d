"""Blocks out of shard files into memory."""
