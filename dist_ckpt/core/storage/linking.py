"""Link a file, or clear its new name so that the caller can write it."""

from __future__ import annotations

from contextlib import suppress

from dist_ckpt.core.storage.protocol import Storage
from dist_ckpt.errors import StorageError


def linked(storage: Storage, old: str, new: str) -> bool:
    """Link a file and return True. If it returns False, the caller writes a file instead.

    `new` is in an attempt that the caller has claimed. FileExistsError if it exists all the same.
    """
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
