"""`.shrew` files, version 1 and 2.

The shrew library saves a model, or a training, as one such file.

- A byte of the format, and what it cannot store: `encoding.py`.
- What an import or export reads and writes: `files.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dist_ckpt.core.runtime.public_names import lazy_exports

if TYPE_CHECKING:
    from dist_ckpt.interop.shrew.files import export_file, import_file, read, write

__all__ = ["export_file", "import_file", "read", "write"]

__getattr__ = lazy_exports(
    __name__, {"export_file": "files", "import_file": "files", "read": "files", "write": "files"}
)
