"""What readers of other systems' files share: a virtual checkpoint over them, and pickles.

`virtual_checkpoint.py` builds only the documents: the tensors stay in their files. Pickles are read
without unpickling: nothing that they name is ever looked up. A format is a module that locates its
tensors, and a line in `interop/registry.py`.
"""
