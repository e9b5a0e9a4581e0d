"""Tensors of every kind on this rank.

- A new tensor class, in a save or a load: `_local_tensor` in `locate_tensor.py`. A subclass with
  `__tensor_flatten__` usually needs no change. DTensor placements: `dtensors.py`.
- Tensor subclasses made of inner tensors (`__tensor_flatten__`): `tensor_subclasses.py`.
- A subclass that a save refuses, and the remedy in the message: `to_plain_tensor` and
  `_remedy_of_class` in `local_tensors.py`.
- A dtype, a numpy array: `local_tensors.py`.
- Plain data with torch or numpy types: `plain_torch.py`.
"""
