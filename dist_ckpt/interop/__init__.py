"""Other systems: their functions over our format, and their files in and out.

`dcp.py` serves torch's own checkpoint functions. `hf.py`, `dcp_export.py` and `torch_export.py`
write what other libraries read, and `imports.py` makes checkpoints of what they wrote, which
`foreign/` reads where it lies. `shrew.py` does both for a format of one file, by `plain_states.py`
and `lone_save.py`. What goes in or out has a line in `cli/formats.py`.
"""
