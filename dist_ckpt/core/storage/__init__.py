"""The storage of checkpoints: the protocol, and `open_storage`.

- Another backend: a class like `LocalStorage` in `local/local_storage.py`, with the methods of
  `interface.py`. `open_storage` opens it, and its test subclasses `testing/storage_contract.py`.
  `async_save/snapshots/job_folder.py` and `cli/commands/gc.py` also need a change: they handle
  local paths only. An object store, such as S3, cannot implement the protocol.
- A storage above another one, for reads: a class like `OverlayStorage` in `virtual_files.py`. A
  tier that writes to a fast storage first also needs a rule for what is durable.
- Count, delay or time the calls of any storage: a class in `forwarding.py`.
"""

from __future__ import annotations

import os
import re

from dist_ckpt.core.format.strict_json import is_text
from dist_ckpt.core.storage.forwarding import DeadlineStorage
from dist_ckpt.core.storage.interface import Entry, ReadableFile, Storage, WritableFile
from dist_ckpt.core.storage.local.local_storage import LocalStorage
from dist_ckpt.errors import NotFoundError

__all__ = ["Entry", "ReadableFile", "Storage", "WritableFile", "open_storage"]

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")


def open_storage(
    path: str | os.PathLike[str], *, direct_reads: bool = False
) -> tuple[Storage, str]:
    """Return the storage of a user's path, and the path as that storage names it. No I/O.

    The path is made absolute once, so that a later `chdir` has no effect. `direct_reads` bypasses
    the page cache: use it to read large files once. Raises ValueError or TypeError for an invalid
    path, NotFoundError if it is relative and the current folder was removed.
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
            f"path is {text!r}, and the current folder of this process was removed: change to "
            f"another, or pass a path that begins with /"
        ) from None
    if not is_text(absolute):
        raise ValueError(
            f"path {absolute!r} is not valid UTF-8 and cannot be sent to other ranks: "
            f"rename the folder, or choose another path"
        )
    return DeadlineStorage(LocalStorage(direct_reads=direct_reads)), absolute


def real_path(path: str) -> str:
    """Return a storage's path with all links followed.

    Annotations are stored next to the checkpoint's real folder, not next to a link to it.
    """
    return os.path.realpath(path).replace(os.sep, "/")
