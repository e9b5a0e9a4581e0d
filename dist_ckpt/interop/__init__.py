"""Other systems: read and write their files, and use their functions with this format.

- Which system wrote a file, and which module reads it: `registry.py`.
- What `dc.load` and `dc.open` read in place: the `read` module of a system, and `frameworks/`.
- What an import does with it: `imports.py`. What all readers share: `readers/`.
- What an export writes: the `export` module of a system, over `tools/new_files.py`.
- `torch.distributed.checkpoint` over this format: `dcp/adapter.py`.

Each format has a line in `cli/commands/import_.py` or `cli/commands/export.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dist_ckpt.core.runtime.public_names import refuse_old_names

if not TYPE_CHECKING:
    _NEW_NAMES = {"dcp_export": "dcp", "torch_export": "torch_save"}
    __getattr__ = refuse_old_names(__name__, _NEW_NAMES)
