"""The index: the one JSON document that makes a checkpoint.

- A field: in the classes of `index.py`, then encoded, decoded and checked in `index_json.py`.
- Tables of ranges of tensors, such as parameters: `tensor_ranges.py`.
- The comparison of `kind` and `config` with a checkpoint: `model_description.py`.
"""
