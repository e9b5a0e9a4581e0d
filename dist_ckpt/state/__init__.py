"""What a rank holds: tensors, modules, optimizers, and the wrappers around them.

`tree.py` tells what each key of a state is, and `read_tree.py` finds it out; `tensors.py` and
`dtensors.py` know sharded tensors, `compounds.py` those that are made of others, `modules.py` and
`optimizers.py` what is in those (no table by class: all are read alike); `fsdp1.py` and
`flat_optimizers.py` tell the parameters in FSDP1's flat ones apart;
`local_state.py` puts it together for a save. How a load fills it is in `dist_ckpt.binding`.
"""
