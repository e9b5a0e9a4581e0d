"""`dc.average`: the mean of checkpoints as a new one, by one process or by the ranks of a job.

- Which checkpoints, and their weights: `checkpoint_selection.py`.
- Which tensors, the arithmetic, and the dtypes: `mean.py`.
- The steps of an average, and which rank writes which file: `average.py`.
"""
