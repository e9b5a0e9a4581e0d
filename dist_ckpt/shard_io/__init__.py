"""Shards in and out of files, block by block, checked: without ranks, without torch."""
