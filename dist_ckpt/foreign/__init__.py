"""Files that other systems wrote, read where they lie as if they were a checkpoint.

`virtual_checkpoint.py` makes the documents of one that has the tensors where the files have them;
a format is a module that finds the tensors in its files, and a line in `find.py`.
"""
