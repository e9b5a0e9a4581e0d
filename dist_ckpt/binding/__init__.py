"""The loading side of a state: which live memory each saved name goes to.

`bind.py` says the steps. `rename.py` is the option `rename`; `bind_modules.py`
and `bind_optimizers.py` know what is odd about those; `requests.py` collects what all ask for,
`targets.py` the tensors among it, `fresh_compounds.py` those made of others that are new;
`saved_tree.py` is what the checkpoint has under these names, and `values.py` what goes where.
"""
