"""Other systems: their functions over our format, and their files in and out.

`dcp.py` serves torch's own checkpoint functions. Files go in and out by functions, and as
`dist-ckpt import` and `export`: a format is a module with `import_file` and `export_file`, and a
line in `cli/formats.py`. What it reads becomes a checkpoint by `plain_states.py` and
`lone_save.py`.
"""
