"""Tensor memory that bytes are read from or placed in: host, torch, CUDA.

- The protocols of a reader and a target: `cell_memory.py`.
- Their implementations, and casts: `torch_tensor.py`; without torch: `host_array.py`.
- Copies from devices in parallel to training: `device_staging.py`; CUDA: `cuda.py`.
- Copies to devices in parallel to the reads of a load: `pinned_buffers.py`.
"""
