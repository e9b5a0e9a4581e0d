"""FullyShardedDataParallel: its modules, optimizers and private names."""
