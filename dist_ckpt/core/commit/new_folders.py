"""Create folders and record which are new, so that a failed claim removes only those."""

from __future__ import annotations

import posixpath
from contextlib import suppress

from dist_ckpt.core.storage import Storage
from dist_ckpt.errors import ExistsError, StorageError


def make_folders(storage: Storage, path: str, new_folders: list[str]) -> None:
    """Create `path` and its missing parents; append the new ones to `new_folders`, top first."""
    try:
        _make_folder(storage, path, new_folders)
    except FileNotFoundError:
        make_folders(storage, posixpath.dirname(path), new_folders)
        with suppress(FileNotFoundError):  # a delete removed the parent: the caller tries again
            _make_folder(storage, path, new_folders)


def _make_folder(storage: Storage, path: str, new_folders: list[str]) -> None:
    try:
        storage.make_folder(path)
    except FileExistsError:
        return
    except NotADirectoryError:
        raise ExistsError(f"{path} is below a file: choose another path") from None
    except StorageError:
        new_folders.append(path)  # it may exist in spite of the error
        raise
    new_folders.append(path)
