"""torch.distributed.checkpoint: read, export, and its planners over our format.

- A folder of a newer torch: `_DCP_NAMES` of `read.py`, the names that `.metadata` may have.
- What a torchrun job calls as `dcp.save` and `dcp.load`: `adapter.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dist_ckpt.core.runtime.public_names import lazy_exports

if TYPE_CHECKING:
    from dist_ckpt.interop.dcp.adapter import DcpLoadReport, StorageReader, StorageWriter, load
    from dist_ckpt.interop.dcp.export import export_folder

__all__ = ["DcpLoadReport", "StorageReader", "StorageWriter", "export_folder", "load"]

__getattr__ = lazy_exports(
    __name__,
    {
        **dict.fromkeys(("DcpLoadReport", "StorageReader", "StorageWriter", "load"), "adapter"),
        "export_folder": "export",
    },
)
