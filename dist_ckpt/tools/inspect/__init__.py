"""Look at checkpoints and compare them; without torch.

- The summary, the layout, and the statistics of one checkpoint: `describe.py`.
- The differences of two checkpoints: `diff.py`; of several runs: `compare.py`.
- The size, time and space of a future job: `estimate.py`.
"""
