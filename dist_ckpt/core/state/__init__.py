"""The user's state: how a save reads it, and how a load fills it.

- A new class of leaf, or object in a state: `tree/state_tree.py`. The content of a
  save: `inventory_builder.py`. The live memory of a saved name, for a load: `binding/`.
- A new tensor class: `tensors/locate_tensor.py`. A tensor subclass made of inner tensors:
  `tensors/tensor_subclasses.py`; one that a load creates: `binding/new_subclasses.py`.
- An optimizer with another `state_dict`, or other keys in it: `optimizer_state.py`; the names of
  its parameters: `named_optimizers.py`; its load: `binding/bind_optimizers.py`.
- A wrapper around modules: `module_tensors.py`. FSDP1's flat parameters: `fsdp1/`.
"""
