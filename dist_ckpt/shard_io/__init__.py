"""Shards in and out of files, block by block, checked; without ranks or torch."""
