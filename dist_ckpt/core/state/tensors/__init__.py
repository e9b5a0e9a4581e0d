"""Tensors of every kind on this rank.

- A new tensor class: `_local_tensor` in `read_tensor.py`. DTensor placements: `dtensors.py`.
- Tensor subclasses made of inner tensors: `tensor_subclasses.py`.
- A dtype, a numpy array, why a tensor is refused: `local_tensors.py`.
- Plain data with torch or numpy types: `plain_torch.py`.
"""
