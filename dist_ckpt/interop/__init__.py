"""Other systems: read and write their files, and use their functions with this format.

`interop/dcp/adapter.py` adapts torch's checkpoint functions. The `export` modules write files for
other libraries, and `imports.py` makes checkpoints from theirs. The `read` modules, and those in
`interop/frameworks/`, read files in place. `interop/shrew/files.py` reads and writes one-file
checkpoints. Each format has a line in `cli/commands/import_.py` or `cli/commands/export.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dist_ckpt.core.runtime.public_names import refuse_old_names

if not TYPE_CHECKING:
    _NEW_NAMES = {"dcp_export": "dcp", "torch_export": "torch_save"}
    __getattr__ = refuse_old_names(__name__, _NEW_NAMES)
