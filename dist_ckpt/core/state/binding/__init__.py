"""The loading side of a state: which live memory each saved name goes to.

- `bind.py` has the steps. `template.py` reads the state that is loaded into.
- `bind_requests.py` collects the requests; `bind_optimizers.py` handles optimizers.
- `sources/saved_tree.py` has the saved names and values, `sources/rename.py` the option `rename`.
- `targets.py` has the memory of tensors, `new_subclasses.py` new tensor subclasses.
"""
