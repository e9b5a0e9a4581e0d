"""Where bytes come from and go to: host memory, torch, CUDA, shared memory.

`protocol.py` has the two protocols, `Source` and `Target`; `host_array.py` and `torch_tensor.py`
keep them. `cuda.py` copies beside the training, and makes optimizers wait for it.
"""
