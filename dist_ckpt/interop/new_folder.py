"""Create folders of files for other systems: complete and durable, or not at all."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from dist_ckpt.core.storage import Storage
from dist_ckpt.core.storage.local.local_storage import describe_os_error, exchange_names
from dist_ckpt.errors import (
    CheckpointError,
    CorruptError,
    ExistsError,
    IncompatibleError,
    StorageError,
)
from dist_ckpt.interop.hf import read
from dist_ckpt.interop.hf.export_plan import METADATA
from dist_ckpt.interop.registry import HF_INDEX, SAFETENSORS
from dist_ckpt.tools.new_file import check_parent, temporary_beside

_log = logging.getLogger("dist_ckpt")


@contextmanager
def new_folder(storage: Storage, path: str, *, overwrite: bool | None) -> Iterator[str]:
    """Yield a temporary folder to write into; rename it to `path`, durably, at the end.

    The temporary folder is next to `path`, and is removed after an error. An empty folder at `path`
    is replaced. With `overwrite`, so is a folder of an earlier export: its other files, such as
    config.json, are linked into the new one. `overwrite` is None if replacing is impossible.
    ExistsError if anything else exists at `path`.
    """
    check_replaceable(storage, path, overwrite=overwrite)
    temporary = temporary_beside(path)
    is_renamed = False
    try:
        storage.make_folder(temporary)
        yield temporary
        for file in check_replaceable(storage, path, overwrite=overwrite):
            storage.link(f"{path}/{file}", f"{temporary}/{file}")
        storage.sync(temporary)
        _rename(storage, temporary, path, replaces=bool(overwrite))
        is_renamed = True
        storage.sync(os.path.dirname(path))
    except BaseException:
        if not is_renamed:
            _remove(storage, temporary)
        raise
    _remove(storage, temporary)  # after an exchange, this is the old folder


def check_replaceable(storage: Storage, path: str, *, overwrite: bool | None) -> tuple[str, ...]:
    """Return the files to keep of a folder at `path`. ExistsError if it must not be replaced.

    With `overwrite`, a folder can be replaced if exports wrote all its safetensors files. Its other
    files are kept.
    """
    if not isinstance(overwrite, bool | None):
        raise TypeError(f"overwrite={overwrite!r}: give True or False")
    check_parent(path)
    if os.path.islink(path):  # callers resolve links first
        raise ExistsError(f"{path} is now a link to {os.readlink(path)}: look at it")
    try:
        entries = storage.list(path)
    except FileNotFoundError:
        return ()
    except NotADirectoryError:
        raise ExistsError(f"{path} is not a folder: choose another path") from None
    if entries and not overwrite:
        remedy = "replace it (overwrite=True, on the command line --overwrite)"
        raise ExistsError(
            f"{path}: something is there already: choose another path, or "
            f"{'remove it' if overwrite is None else remedy}"
        )
    foreign_names = [entry.name for entry in entries if entry.kind != "file"]
    tensor_files = [entry.name for entry in entries if entry.name.endswith(SAFETENSORS)]
    files = [name for name in tensor_files if name not in foreign_names]
    foreign_names += [name for name in files if not _is_of_export(storage, path, name)]
    if foreign_names:
        raise ExistsError(
            f"{path} has {', '.join(sorted(foreign_names)[:5])}, which no export has "
            f"written, so it is not replaced: choose another path, or remove it"
        )
    replaced = {*tensor_files, HF_INDEX}
    return tuple(entry.name for entry in entries if entry.name not in replaced)


def write_document(storage: Storage, path: str, data: bytes) -> int:
    """Write a small file, durably; return its size."""
    file = storage.create(path, len(data))
    try:
        file.write_at(0, data)
        return file.finish()
    finally:
        file.discard()


def _is_of_export(storage: Storage, folder: str, name: str) -> bool:
    try:
        state = read.read_file(storage, f"{folder}/{name}")
    except (CorruptError, IncompatibleError):
        return False
    return state.metadata.get("exported_by") == METADATA["exported_by"]


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
