"""What a rank holds: tensors, modules, optimizers, and the wrappers around them.

`tree.py` tells what each key of a state is; `tensors.py` is the only module that knows sharded
tensors, `modules.py` and `optimizers.py` what is in those (no table by class: all are read alike);
`local_state.py` puts it together for a save. How a load fills it is in `dist_ckpt.binding`.
"""
