"""Tensor memory as source and target of bytes: host, torch, CUDA.

- The protocols of a source and a target: `cell_memory.py`.
- Their implementations, and casts: `torch_tensor.py`; without torch: `host_array.py`.
- Copies from CUDA devices in parallel to training: `cuda.py`.
"""
