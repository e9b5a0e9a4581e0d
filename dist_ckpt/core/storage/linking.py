"""Link a file, or make way for whoever writes it instead."""

from __future__ import annotations

from contextlib import suppress

from dist_ckpt.core.storage.protocol import Storage
from dist_ckpt.errors import StorageError


def linked(storage: Storage, old: str, new: str) -> bool:
    """Give a file one more name; say whether it has it. If not, the caller writes a file of it.

    `new` lies in an attempt that the caller has claimed, and nobody else makes it. FileExistsError
    if it was made all the same.
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
