"""Where checkpoints lie, for who writes a storage backend: the protocol and `open_storage`."""

from __future__ import annotations

from dist_ckpt.core.storage import Entry, ReadableFile, Storage, WritableFile, open_storage

__all__ = ["Entry", "ReadableFile", "Storage", "WritableFile", "open_storage"]
