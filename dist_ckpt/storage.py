"""The protocol of a storage backend, and `open_storage`: for authors of backends."""

from __future__ import annotations

from dist_ckpt.core.storage import Entry, ReadableFile, Storage, WritableFile, open_storage

__all__ = ["Entry", "ReadableFile", "Storage", "WritableFile", "open_storage"]
