"""An opened checkpoint: look into it, read parts of it, verify it; without torch.

- `dc.open`, and what users see of a checkpoint: `checkpoint.py`.
- `dc.verify`: `verify_checkpoint.py`.
- Reads of tensors and objects for tools: `open_checkpoint.py`.
- The meaning of a user's path: `opener.py`, implemented in `default_opener.py`.
"""
