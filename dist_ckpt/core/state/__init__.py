"""What a rank holds, and what a load puts back into it.

`state/tree/leaves.py` tells what each key of a state is, and `state/tree/read_tree.py` finds it
out; `state/tensors/read_tensor.py` and `state/tensors/dtensors.py` know sharded tensors,
`state/tensors/tensor_subclasses.py` those that are made of others, `modules.py` and
`state/optimizers/named_optimizers.py` what is in those (no table by class: all are read alike);
`state/fsdp1/modules.py` and `state/fsdp1/optimizers.py` tell the parameters in FSDP1's flat ones
apart; `inventory_builder.py` puts it together for a save. How a load fills it is in
`dist_ckpt.core.state.binding`.
"""
