"""Create folders of files for other systems: complete and durable, or not at all."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from dist_ckpt.core.storage import Entry, Storage
from dist_ckpt.core.storage.local.local_storage import describe_os_error, exchange_names
from dist_ckpt.errors import CheckpointError, ExistsError, StorageError
from dist_ckpt.tools.new_file import check_parent, temporary_beside

_log = logging.getLogger("dist_ckpt")


def check_no_folder(storage: Storage, path: str) -> tuple[str, ...]:
    """Return (), for `new_folder`. ExistsError unless a path is free, or an empty folder."""
    if list_target(storage, path):
        raise ExistsError(f"{path}: something is there already: choose another path, or remove it")
    return ()


@contextmanager
def new_folder(
    storage: Storage,
    path: str,
    check: Callable[[Storage, str], tuple[str, ...]] = check_no_folder,
    *,
    replaces: bool = False,
) -> Iterator[str]:
    """Yield a temporary folder to write into; rename it to `path`, durably, at the end.

    The temporary folder is next to `path`, and is removed after an error. An empty folder at `path`
    is replaced. With `replaces` any folder is, if `check` allows it: it raises an error, or returns
    the old files to link into the new folder. ExistsError if anything else exists at `path`.
    """
    check(storage, path)
    temporary = temporary_beside(path)
    is_renamed = False
    try:
        storage.make_folder(temporary)
        yield temporary
        for file in check(storage, path):
            storage.link(f"{path}/{file}", f"{temporary}/{file}")
        storage.sync(temporary)
        _rename(storage, temporary, path, replaces=replaces)
        is_renamed = True
        storage.sync(os.path.dirname(path))
    except BaseException:
        if not is_renamed:
            _remove(storage, temporary)
        raise
    _remove(storage, temporary)  # after an exchange, this is the old folder


def list_target(storage: Storage, path: str) -> Sequence[Entry]:
    """Return the entries of the folder at `path`, if any. ExistsError for anything but a folder."""
    check_parent(path)
    if os.path.islink(path):  # callers resolve links first
        raise ExistsError(f"{path} is now a link to {os.readlink(path)}: look at it")
    try:
        return storage.list(path)
    except FileNotFoundError:
        return ()
    except NotADirectoryError:
        raise ExistsError(f"{path} is not a folder: choose another path") from None


def write_document(storage: Storage, path: str, data: bytes) -> int:
    """Write a small file, durably; return its size."""
    file = storage.create(path, len(data))
    try:
        file.write_at(0, data)
        return file.finish()
    finally:
        file.discard()


def _rename(storage: Storage, temporary: str, path: str, *, replaces: bool) -> None:
    """Rename the folder to `path`; a nonempty old folder gets the temporary name."""
    try:
        if os.path.lexists(path):
            with suppress(OSError):
                os.rmdir(path)
        if not replaces or not os.path.lexists(path):
            storage.rename(temporary, path)
        elif not exchange_names(temporary, path):
            old = f"{temporary[:-4]}.old.tmp"
            storage.rename(path, old)
            try:
                storage.rename(temporary, path)
            except BaseException:
                storage.rename(old, path)
                raise
            storage.rename(old, temporary)
    except FileExistsError:
        raise ExistsError(f"{path} was created meanwhile by another process: look at it") from None
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {describe_os_error(error)}") from error


def _remove(storage: Storage, folder: str) -> None:
    """Remove a folder of files. A failure is only logged."""
    try:
        for entry in storage.list(folder):
            storage.remove(f"{folder}/{entry.name}")
        storage.remove(folder)
    except FileNotFoundError:
        return
    except (CheckpointError, OSError) as error:
        _log.warning("%s was not removed; you can remove it: %s", folder, error)
    except BaseException:
        _log.warning("%s was not removed (interrupted); you can remove it", folder)
        raise
