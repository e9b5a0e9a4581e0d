"""The loading side of a state: which live memory each saved name goes to.

`bind.py` says the steps. `state/binding/sources/rename.py` is the option `rename`;
`bind_modules.py` and `bind_optimizers.py` know what is odd about those; `bind_requests.py` collects
what all ask for, `state/binding/targets/targets.py` the tensors among it,
`state/binding/targets/new_subclasses.py` those made of others that are new;
`state/binding/sources/saved_tree.py` is what the checkpoint has under these names, and
`state/binding/targets/load_values.py` what goes where.
"""
