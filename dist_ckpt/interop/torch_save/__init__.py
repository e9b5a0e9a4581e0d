"""Files of torch.save: read and export.

- The zip archive and its records: `read.py`. Names in its pickle: `interop/readers/`.
- What an export writes, and which values need `weights_only=False`: `export.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dist_ckpt.core.runtime.public_names import lazy_exports

if TYPE_CHECKING:
    from dist_ckpt.interop.torch_save.export import export_file

__all__ = ["export_file"]

__getattr__ = lazy_exports(__name__, {"export_file": "export"})
