"""A single new file of a user on this host: whole and durable under its name, or not there."""

from __future__ import annotations

import logging
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from dist_ckpt.core.commit.preflight import check_new_name
from dist_ckpt.core.format.filenames import is_reserved_name
from dist_ckpt.core.storage.local.exclusive_rename import rename_exclusively
from dist_ckpt.core.storage.local.local_storage import LocalStorage, with_remedy
from dist_ckpt.core.storage.streamed_file import StreamedFile
from dist_ckpt.errors import ExistsError, NotFoundError, StorageError

_log = logging.getLogger("dist_ckpt")


@contextmanager
def new_file(
    path: str | os.PathLike[str], *, overwrite: bool, nbytes: int = 0
) -> Iterator[StreamedFile]:
    """Write a file: it has its name, whole and durable, when the `with` has ended well.

    Until then it has another name, in the same folder; after an error it is removed. Only with
    `overwrite` does it replace what is there, whose permissions it gets. ExistsError if something
    is there, StorageError otherwise.
    `nbytes` is what it will have at least: there is room for that, or the disk is said to be full.
    """
    where = check_new_file(path, overwrite=overwrite)
    temporary = temporary_beside(where)
    try:
        with StreamedFile(LocalStorage(), temporary, nbytes) as file:
            yield file
            file.finish()
        if overwrite:
            with suppress(FileNotFoundError):  # who might not read the old one may not read this
                os.chmod(temporary, stat.S_IMODE(os.stat(where).st_mode))
            os.replace(temporary, where)
        else:
            rename_exclusively(temporary, where)
        sync_folder(os.path.dirname(where))
    except FileExistsError:
        raise _exists(where) from None
    except StorageError as error:  # in the words of who asked: the other name is gone now
        raise StorageError(str(error).replace(temporary, where)) from error
    except OSError as error:
        raise StorageError(f"{where} cannot be written: {with_remedy(error)}") from error
    finally:
        with suppress(OSError):
            os.unlink(temporary)


def check_new_file(path: str | os.PathLike[str], *, overwrite: bool) -> str:
    """Return the absolute path of a file to write.

    ExistsError if something is there, NotFoundError without a folder for it.
    """
    if type(overwrite) is not bool:
        raise TypeError(f"overwrite={overwrite!r}: give True or False")
    where = os.path.abspath(checked_file_path(path))
    check_parent(where)
    if not os.path.lexists(where):
        return where
    if not overwrite:
        raise _exists(where)
    if not stat.S_ISREG(os.lstat(where).st_mode):
        raise ExistsError(f"{where} is no regular file and is not replaced: give another path")
    return where


def check_parent(where: str) -> None:
    """Raise NotFoundError unless there is a folder that something new can be put into.

    ValueError if the new name would be taken for something else.
    """
    if not os.path.isdir(parent := os.path.dirname(where)):
        raise NotFoundError(f"{parent}: there is no such folder; make it first")
    is_of_run = "@" in where or is_reserved_name(os.path.basename(where))
    if is_of_run and not os.path.lexists(where):
        check_new_name(LocalStorage(), where)


def check_outside(source: str, target: str) -> None:
    """Raise ValueError if what is written would lie on or in what is read. Both without links."""
    if target == source or target.startswith(f"{source}/"):
        raise ValueError(f"{target} lies in the source, or is it: give another path")


def checked_file_path(path: object) -> str:
    """Return the path of a file as text. TypeError or ValueError for what is none."""
    text = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(text, str):
        raise TypeError(f"the file is a {type(path).__name__}: pass a str or a pathlib.Path")
    if not text or "\0" in text:
        raise ValueError(f"the file is {text!r}: pass the path of a file")
    return text


def _exists(where: str) -> ExistsError:
    return ExistsError(
        f"{where}: something is there already: choose another path, or replace it "
        "(overwrite=True, on the command line --overwrite)"
    )


def temporary_beside(path: str) -> str:
    """Return a new name beside a path, for what is not complete yet.

    Logs what such names are there already: nobody else removes what a killed process has left.
    """
    folder, name = os.path.split(path)
    # So short that it is no longer than a name may be because of what we add.
    short = os.fsdecode(os.fsencode(name)[:100])
    of_path = re.compile(rf"\.{re.escape(short)}\.[0-9a-f]{{16}}\.tmp")
    with suppress(OSError):  # who may write there need not be allowed to look
        for left in filter(of_path.fullmatch, os.listdir(folder)):
            _log.warning(
                "%s is left of a process that was killed, or is being written: remove it if nobody "
                "writes to it",
                os.path.join(folder, left),
            )
    return os.path.join(folder, f".{short}.{secrets.token_hex(8)}.tmp")


def sync_folder(folder: str) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
