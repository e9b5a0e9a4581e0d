"""`dc.average`: the mean of checkpoints as a new one, by one process or by the ranks of a job.

`source_selection.py` finds the checkpoints, `structure.py` says which of their tensors are
averaged, `mean.py` computes, and `write_assignment.py` tells which rank writes which file.
"""
