"""What the system keeps of files in memory, and how it is made to read them again."""

from __future__ import annotations

import os
from contextlib import suppress


def drop_cached(folder: str) -> None:
    """Have the next reads of the files in a folder come from the disk, where the system can do so.

    A hint: what other processes have mapped stays. Never raises.
    """
    if not hasattr(os, "posix_fadvise"):
        return
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_file(follow_symlinks=False):
                drop_cached_file(entry.path)


def drop_cached_file(file: str) -> None:
    """Do so for one file. Never raises."""
    with suppress(OSError):
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
