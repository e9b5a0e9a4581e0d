"""Where checkpoints lie: the protocol, and `open_storage`.

A backend implements `protocol.py`, and is tested by a subclass of
`dist_ckpt.testing.storage_contract.StorageContract`. `storage/local/local_storage.py` is the only
one so far, over `storage/local/direct_io.py` and `storage/local/exclusive_rename.py`:
`open_storage` refuses other schemes. `async_save/snapshots/job_folder.py` and
`cli/commands/changing.py` handle paths of local files only. `storage/wrappers/counting.py`,
`storage/wrappers/deadline.py` and `storage/wrappers/pacing.py` wrap any backend.
"""

from __future__ import annotations

import os
import re

from dist_ckpt.core.format.strict_json import is_text
from dist_ckpt.core.storage.local.local_storage import LocalStorage
from dist_ckpt.core.storage.protocol import Entry, ReadableFile, Storage, WritableFile
from dist_ckpt.core.storage.wrappers.deadline import DeadlineStorage
from dist_ckpt.errors import NotFoundError

__all__ = ["Entry", "ReadableFile", "Storage", "WritableFile", "open_storage"]

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")


def open_storage(
    path: str | os.PathLike[str], *, direct_reads: bool = False
) -> tuple[Storage, str]:
    """Return the storage that a user's path lies on, and the path as that storage names it.

    Touches nothing. The path is made absolute here, once, so that a later `chdir` changes
    nothing. `direct_reads` is for who reads large files once: what the page cache does not hold
    of them comes past it. Raises ValueError or TypeError for what is no path, NotFoundError for
    one below a folder that was removed.
    """
    text = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(text, str):
        raise TypeError(f"path is a {type(text).__name__}: pass a str or a pathlib.Path")
    if match := _SCHEME.match(text):
        raise ValueError(
            f"path begins with {match[1]}:// but only file systems are supported: pass the path "
            f"of a folder on storage that all ranks share"
        )
    if not text or "\0" in text:
        raise ValueError(f"path is {text!r}: pass the path of a folder")
    try:
        absolute = os.path.abspath(text).replace(os.sep, "/")
    except FileNotFoundError:
        raise NotFoundError(
            f"path is {text!r}, and the folder that this process is in was removed: change to "
            f"another, or pass a path that begins with /"
        ) from None
    if not is_text(absolute):
        raise ValueError(
            f"path is {absolute!r}, which is not UTF-8 and cannot be told to other ranks: "
            f"rename the folder, or choose another path"
        )
    return DeadlineStorage(LocalStorage(direct_reads=direct_reads)), absolute


def real_path(path: str) -> str:
    """Return a storage's path with links followed; where there are no links it is the same.

    What is known of a checkpoint lies beside its folder, not beside a link that leads there.
    """
    return os.path.realpath(path).replace(os.sep, "/")
