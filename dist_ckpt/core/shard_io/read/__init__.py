"""Read blocks of shard files into memory."""
