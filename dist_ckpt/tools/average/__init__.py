"""`dc.average`: the mean of checkpoints as a new one, by one process or by the ranks of a job.

`source_selection.py` finds the checkpoints, `mean.py` chooses their tensors and computes, and
`average.py` has the steps, and the files that each rank writes.
"""
