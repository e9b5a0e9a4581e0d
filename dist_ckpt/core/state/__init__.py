"""The user's objects: how a save reads them, and how a load fills them.

- `tree/state_tree.py` has the types of a state's leaves, and reads a state as a tree of them.
- `tensors/read_tensor.py` and `tensors/dtensors.py` read sharded tensors,
  `tensors/tensor_subclasses.py` tensors made of others.
- `modules.py` and `named_optimizers.py` read modules and optimizers, without a table of classes.
  `fsdp1/modules.py` and `fsdp1/optimizers.py` split FSDP1's flat parameters.
- `inventory_builder.py` collects all of it for a save. `binding/` fills a state in a load.
"""
