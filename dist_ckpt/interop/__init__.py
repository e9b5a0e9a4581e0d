"""Other systems: their files in and out, and their functions over our format.

`interop/dcp/adapter.py` serves torch's checkpoint functions. The `export` modules write files for
other libraries, and `imports.py` makes checkpoints from theirs. The `read` modules, and those in
`interop/frameworks/`, read files in place. `interop/shrew/files.py` reads and writes one-file
checkpoints. Each format has a line in `cli/commands/import_.py` or `cli/commands/export.py`.
"""
