"""Saved tensors and the live ones that they fill: which cells, and the differences that convert.

- Which cells of a saved tensor fill a live one, and the texts of errors: `tensor_matcher.py`.
- The option `resize`: `resizing.py`. The options `cast` and `dequantize`: `dequantizer.py`.
"""
