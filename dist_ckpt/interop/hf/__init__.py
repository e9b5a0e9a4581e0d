"""Hugging Face folders of safetensors files: read and export.

- What an export writes, the size of the files and which tensor is in which file: `export.py`.
- Names of the adapters of peft: `adapters.py`.
- Folders that are read in place: `read.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dist_ckpt.core.runtime.public_names import lazy_exports

if TYPE_CHECKING:
    from dist_ckpt.interop.hf.adapters import adapter_rename
    from dist_ckpt.interop.hf.export import export_folder

__all__ = ["adapter_rename", "export_folder"]

__getattr__ = lazy_exports(__name__, {"adapter_rename": "adapters", "export_folder": "export"})
