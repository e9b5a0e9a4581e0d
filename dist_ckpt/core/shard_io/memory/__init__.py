"""Tensor memory as source and target of bytes: host, torch, CUDA.

`protocol.py` has `CellSource` and `Target`; `torch_tensor.py` implements both, `host_array.py` the
second. `cuda.py` copies in parallel to training, and makes optimizers wait for the copies.
"""
