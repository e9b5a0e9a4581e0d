"""Link a file, or clear its new name so that the caller can write it."""

from __future__ import annotations

from contextlib import suppress

from dist_ckpt.core.storage.protocol import Storage
from dist_ckpt.errors import StorageError


def linked(storage: Storage, old: str, new: str) -> bool:
    """Link a file into the caller's attempt, or return False: then the caller writes it instead."""
    try:
        storage.link(old, new)
    except FileNotFoundError:  # pruned meanwhile
        return False
    except StorageError:
        # The storage may have linked it and lost the reply.
        with suppress(StorageError, FileNotFoundError, NotADirectoryError):
            storage.remove(new)
        return False
    return True
