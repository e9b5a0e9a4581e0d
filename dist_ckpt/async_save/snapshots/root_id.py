"""Which job a folder of checkpoints means: its id, which a folder made anew there has not.

It is random and lies in the folder, in a file that `ls` shows: it goes with `rm -rf root/*` too.
A folder's number and birth would not do: numbers are given again at once (ext4), or change while
the folder stays (FUSE), and many file systems know no birth.
"""

from __future__ import annotations

import hashlib
import os
import posixpath
import re
import secrets
from contextlib import suppress

from dist_ckpt.core.commit.attempts import ROUNDS, new_id, store
from dist_ckpt.core.commit.new_folders import make_folders
from dist_ckpt.core.commit.records.old_records import check_upgraded
from dist_ckpt.core.format.filenames import ROOT_ID, temporary_root_id
from dist_ckpt.core.storage import Storage
from dist_ckpt.errors import CorruptError, StorageError

_CONTENT = re.compile(rb"([0-9a-f]{32})\n")
_NBYTES = 33


def job_id(root: str, root_id: str) -> str:
    """Return the job that a folder of checkpoints means, unless the user says it.

    It is the same in every later run that saves into the same folder, on this host: a hash of the
    user, the folder's id, its real path and its device, as a copy has its id.
    """
    real = os.path.realpath(root)
    words = f"{os.geteuid()}\0{_device(real)}\0{root_id}\0{real}"
    return hashlib.blake2b(words.encode(errors="surrogateescape"), digest_size=16).hexdigest()


def find_root_id(storage: Storage, root: str) -> str | None:
    """Return the id of a folder; None if it has none, or is not there.

    CorruptError if something else has the file's name, StorageError if it cannot be read.
    """
    file = posixpath.join(root, ROOT_ID)
    try:
        reader = storage.open(file)
    except FileNotFoundError:
        return None
    except CorruptError as error:
        raise CorruptError(
            f"{file} is no regular file: remove it, or use another root, or AsyncSaver(job=...)"
        ) from error
    data = bytearray(_NBYTES + 1)
    try:
        count = reader.read_into(0, memoryview(data))
    finally:
        reader.close()
    if (found := _CONTENT.fullmatch(data[:count])) is None:
        raise CorruptError(
            f"{file} is not what dist_ckpt writes there: remove it, then what background saves "
            f"have left in memory of this folder is not found again; or use another root, or "
            f"AsyncSaver(job=...)"
        )
    return found[1].decode()


def make_root_id(storage: Storage, root: str) -> str:
    """Return the id of a folder, which gets one, and is made, if need be; it is durable then.

    Whoever calls this at once gets the same one. StorageError or ExistsError if it cannot be made,
    IncompatibleError if the folder is to be upgraded.
    """
    check_upgraded(storage, root)
    for _ in range(ROUNDS):
        if (there := find_root_id(storage, root)) is not None:
            return there
        with suppress(FileExistsError, FileNotFoundError):  # another was faster, or removed it
            _put(storage, root)
    raise StorageError(f"{root} is removed again and again: look who does that")


def _put(storage: Storage, root: str) -> None:
    file = posixpath.join(root, ROOT_ID)
    temporary = posixpath.join(root, temporary_root_id(new_id()))
    try:
        _make_durably(storage, root)
        store(storage, temporary, f"{secrets.token_hex(16)}\n".encode())
        try:
            storage.rename(temporary, file)
        except BaseException:
            with suppress(StorageError, OSError):
                storage.remove(temporary)
            raise
        storage.sync(root)
    except StorageError as error:
        raise StorageError(
            f"{root} gets no file that tells it from another folder of this name ({error}): "
            f"make it writable, or use another root, or AsyncSaver(job=...)"
        ) from error


def _make_durably(storage: Storage, root: str) -> None:
    """Make the folder and what is missing above it, or leave nothing.

    A save finds them there then, and takes it that their names are durable.
    """
    made: list[str] = []
    try:
        make_folders(storage, root, made)
        for folder in made:
            storage.sync(posixpath.dirname(folder))
    except BaseException:
        for folder in reversed(made):
            with suppress(StorageError, OSError):
                storage.remove(folder)
        raise


def _device(path: str) -> int:
    """Return the device of a folder, or of the nearest one above it that exists."""
    while True:
        try:
            return os.stat(path).st_dev
        except (FileNotFoundError, NotADirectoryError):
            path = os.path.dirname(path)
