"""FullyShardedDataParallel: its modules, optimizers and private names.

A newer torch: `fsdp1_private_names.py`. Optimizers: `fsdp1_optimizers.py`.
"""
