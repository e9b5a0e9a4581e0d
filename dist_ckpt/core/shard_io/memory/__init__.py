"""Tensor memory that bytes come from and go to: host, torch, CUDA.

`protocol.py` has the two protocols, `CellSource` and `Target`; `torch_tensor.py` keeps both, and
`host_array.py` the second. `cuda.py` copies beside the training, and makes optimizers wait for it.
"""
