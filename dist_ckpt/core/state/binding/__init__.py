"""The loading side of a state: which live memory each saved name goes to.

- A new step, or kind of leaf: `bind.py`. How the state is read before: `template.py`.
- What is requested for a name, and the per-rank policy: `BindContext` in `bind_context.py`.
- State and groups of optimizers: `bind_optimizers.py`.
- Saved names and values: `sources/saved_tree.py`. The option `rename`: `sources/rename.py`.
- Which cells of a saved tensor fill a live one, and what may differ: `matching/`.
- The memory of tensors: `targets.py`. Tensor subclasses created by a load: `new_subclasses.py`.
"""
