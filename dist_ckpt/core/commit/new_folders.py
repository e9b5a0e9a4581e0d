"""Making folders, and noting which are new: so that who fails takes back no more than its own."""

from __future__ import annotations

import posixpath
from contextlib import suppress

from dist_ckpt.core.storage import Storage
from dist_ckpt.errors import ExistsError, StorageError


def make_folders(storage: Storage, path: str, made: list[str]) -> None:
    """Make `path` and what is missing above it; note in `made`, top first, what is new."""
    try:
        _make_folder(storage, path, made)
    except FileNotFoundError:
        make_folders(storage, posixpath.dirname(path), made)
        with suppress(FileNotFoundError):  # a delete took the parent: the caller tries again
            _make_folder(storage, path, made)


def _make_folder(storage: Storage, path: str, made: list[str]) -> None:
    try:
        storage.make_folder(path)
    except FileExistsError:
        return
    except NotADirectoryError:
        raise ExistsError(f"{path} lies below a file: choose another path") from None
    except StorageError:
        made.append(path)  # it may be there although the storage said no
        raise
    made.append(path)
