"""Other systems: their files in and out, and their functions over our format.

`interop/dcp/adapter.py` serves torch's own checkpoint functions. `interop/hf/export.py`,
`interop/dcp/export.py` and `interop/torch_save/export.py` write what other libraries read, and
`imports.py` makes checkpoints of what they wrote; the `read` module of each system, and those in
`interop/frameworks/`, read it where it lies. `interop/shrew/files.py` does both for a format of
one file, by `interop/writers/plain_states.py` and `interop/writers/single_process_save.py`. What
goes in or out has a line in `cli/commands/import_.py` or
`cli/commands/export.py`.
"""
