"""Write shard files and objects files from memory, or link those of an earlier save."""
