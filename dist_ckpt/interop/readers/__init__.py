"""What readers of other systems' files share: a virtual checkpoint over them.

`virtual_checkpoint.py` makes the documents of one that has the tensors where the files have them;
a format is a module that finds the tensors in its files, and a line in `interop/registry.py`.
"""
