"""The id of a folder of checkpoints, in its file `DIST_CKPT_ROOT`: the default name of a job.

The file is not hidden, so `rm -rf root/*` removes it too. Inode numbers and birth times are not
enough: ext4 reuses a number at once, FUSE may change it, and many file systems have no birth time.
"""

from __future__ import annotations

import hashlib
import os
import posixpath
import re
import secrets
from contextlib import closing, suppress

from dist_ckpt.core.commit.attempts import MAX_TRIES, make_folders, new_id, write_small_file
from dist_ckpt.core.commit.records.record_store import check_upgraded
from dist_ckpt.core.format.filenames import ROOT_ID, temporary_root_id
from dist_ckpt.core.storage import Storage
from dist_ckpt.errors import CorruptError, StorageError

_ROOT_ID_CONTENT = re.compile(rb"([0-9a-f]{32})\n")
_ROOT_ID_NBYTES = 33


def make_job_name(root: str, root_id: str) -> str:
    """Return the default name of the job that saves into a folder of checkpoints.

    The name is a hash of the user, the folder's id, its real path, and its device. So all runs on
    this host that save into the folder get the same name. The id alone is not enough: a copy of the
    folder has it too.
    """
    real = os.path.realpath(root)
    words = f"{os.geteuid()}\0{_find_device(real)}\0{root_id}\0{real}"
    return hashlib.blake2b(words.encode(errors="surrogateescape"), digest_size=16).hexdigest()


def find_root_id(storage: Storage, root: str) -> str | None:
    """Return the id of a folder; None if it has no id or does not exist.

    CorruptError if the file is not regular or has other content. StorageError if it cannot be read.
    """
    file = posixpath.join(root, ROOT_ID)
    try:
        reader = storage.open(file)
    except FileNotFoundError:
        return None
    except CorruptError as error:
        raise CorruptError(
            f"{file} is not a regular file: remove it, or use another root, or AsyncSaver(job=...)"
        ) from error
    data = bytearray(_ROOT_ID_NBYTES + 1)
    with closing(reader):
        count = reader.read_into(0, memoryview(data))
    if (content := _ROOT_ID_CONTENT.fullmatch(data[:count])) is None:
        raise CorruptError(
            f"{file} is not what dist_ckpt writes there: remove it, or use another root, or "
            f"AsyncSaver(job=...). If you remove it, snapshots of this folder in memory are not "
            f"found again"
        )
    return content[1].decode()


def make_root_id(storage: Storage, root: str) -> str:
    """Return the id of a folder. Create the folder and the id, durably, if they do not exist.

    Concurrent callers get the same id. StorageError or ExistsError if no id can be made,
    IncompatibleError if the folder needs an upgrade.
    """
    check_upgraded(storage, root)
    for _ in range(MAX_TRIES):
        if (root_id := find_root_id(storage, root)) is not None:
            return root_id
        with suppress(FileExistsError, FileNotFoundError):  # another process was first
            _write_root_id(storage, root)
    raise StorageError(f"{root} is removed again and again: find out what removes it")


def _write_root_id(storage: Storage, root: str) -> None:
    file = posixpath.join(root, ROOT_ID)
    temporary = posixpath.join(root, temporary_root_id(new_id()))
    try:
        _make_folders_durably(storage, root)
        write_small_file(storage, temporary, f"{secrets.token_hex(16)}\n".encode())
        try:
            storage.rename(temporary, file)
        except BaseException:
            with suppress(StorageError, OSError):
                storage.remove(temporary)
            raise
        storage.sync(root)
    except StorageError as error:
        raise StorageError(
            f"{root}: the file that identifies this folder cannot be written ({error}): "
            f"make it writable, or use another root, or AsyncSaver(job=...)"
        ) from error


def _make_folders_durably(storage: Storage, root: str) -> None:
    """Make the folder and its missing parents durably, or leave none of them.

    A save that finds a folder assumes that its name is durable.
    """
    created: list[str] = []
    try:
        make_folders(storage, root, created)
        for folder in created:
            storage.sync(posixpath.dirname(folder))
    except BaseException:
        for folder in reversed(created):
            with suppress(StorageError, OSError):
                storage.remove(folder)
        raise


def _find_device(path: str) -> int:
    """Return the device of a folder, or of the nearest one above it that exists."""
    while True:
        try:
            return os.stat(path).st_dev
        except (FileNotFoundError, NotADirectoryError):
            path = os.path.dirname(path)
