"""What readers of other systems' files share: a virtual checkpoint over them.

`virtual_checkpoint.py` builds only the documents: the tensors stay in their files. A format is a
module that locates its tensors, and a line in `interop/registry.py`.
"""
