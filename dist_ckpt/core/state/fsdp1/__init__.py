"""FullyShardedDataParallel: its modules, optimizers and private names.

- A newer torch: `fsdp1_private_names.py`, which alone uses the private names.
- Parameters and buffers: `fsdp1_modules.py`. Optimizer states: `fsdp1_optimizers.py`.
"""
