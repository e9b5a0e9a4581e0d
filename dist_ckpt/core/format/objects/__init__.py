"""Objects files: values that are not tensors, as msgpack without code.

A new type of plain data needs a code in `Ext` and maybe a cost in `_EXT_COSTS` (`plain_types.py`),
and a row in both tables of `plain_codec.py`: `_ENCODERS` and `_DECODERS`.
"""
