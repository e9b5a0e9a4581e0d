"""The storage of checkpoints: the protocol, and `open_storage`.

- Another backend: a class like `LocalStorage` in `local/local_storage.py`, with the methods of
  `storage_protocol.py`. `open_storage` opens it. Its test subclasses
  `testing/storage_contract.py`.
  `async_save/snapshots/job_folder.py` and `cli/commands/gc.py` also need a change: they handle
  local paths only. An object store, such as S3, cannot implement the protocol.
- A storage above another one, for reads: a class like `OverlayStorage` in `overlay_storage.py`.
- A tier: copy after the commit, by `_after_commit` in `checkpointer/maintenance.py`. A tier that
  writes to a fast storage first also needs a rule for what is durable.
- Count, delay or time the calls of any storage: a class in `storage_wrappers.py`. It says why no
  call is repeated after an error.
"""

from __future__ import annotations

import os
import posixpath
import re
import shlex
from contextlib import suppress

from dist_ckpt.core.format.filenames import INCARNATIONS, OLD_INCARNATIONS, parse_step_folder
from dist_ckpt.core.format.strict_json import is_text
from dist_ckpt.core.storage.local.local_storage import LocalStorage
from dist_ckpt.core.storage.storage_protocol import Entry, ReadableFile, Storage, WritableFile
from dist_ckpt.core.storage.storage_wrappers import DeadlineStorage
from dist_ckpt.errors import ExistsError, NotFoundError, StorageError

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
    """Return a storage's path with all links followed."""
    return os.path.realpath(path).replace(os.sep, "/")


# --- a step of a run that was moved elsewhere, with a link in its place ----------------------


def entry_path(path: str) -> str:
    """Return a storage's path with all links followed, up to a link `step-N` of a run.

    The annotations of a checkpoint are in the folder above this path. For example, /a/ckpt is a
    link to /b/ckpt: the annotations are in /b. But runs/x/step-5 is a step of a run, moved to
    /old/step-5, with a link in its place: the annotations stay in the run, in runs/x.
    """
    entry = path
    for _ in range(_MAX_LINKS):
        # The text of a link may end with slashes and dots, as `ln -s step-5/ last` makes it.
        folder, name = posixpath.split(_DOTS_AT_END.sub("", entry))
        if name == "..":
            break
        entry = posixpath.join(real_path(folder), name)
        if is_linked_step(entry):
            return entry
        try:
            entry = posixpath.join(posixpath.dirname(entry), os.readlink(entry))
        except OSError:  # no link
            return entry
    return real_path(path)


# The system follows at most this many links, too.
_MAX_LINKS = 40
_DOTS_AT_END = re.compile(r"(?<!^)(/\.?)+$")


def is_linked_step(path: str) -> bool:
    """Return True if a path is a run's entry `step-N`, and a link."""
    return parse_step_folder(posixpath.basename(path)) is not None and os.path.islink(path)


def describe_link(path: str) -> str:
    """Return "... is a link to ...", for a message."""
    target = real_path(path)
    with suppress(OSError):
        target = os.readlink(path)
    return f"{path} is a link to {target}"


def is_readable_step(storage: Storage, path: str) -> bool:
    """Return True if a path is a linked step that is read."""
    return is_linked_step(path) and not linked_step_problem(storage, path)


def linked_step_problem(storage: Storage, path: str) -> str:
    """Return why a linked step is not read, "" if it is.

    It must lead to a folder of this user, or of the owner of the run. That folder must not be in a
    run: a prune of that run would remove it.
    """
    label = describe_link(path)
    try:
        storage.list(path)
        uid, owners = os.stat(path).st_uid, {os.stat(posixpath.dirname(path)).st_uid, os.geteuid()}
    except NotADirectoryError:
        return f"{label}, which is not a folder: remove the link"
    except FileNotFoundError:
        return f"{label}, which does not exist: mount or restore that folder, or remove the link"
    except (OSError, StorageError) as error:
        return f"{label}, which cannot be read: {error}"
    if uid not in owners:
        return (
            f"{label}, a folder of user {uid}. Only folders of this user, or of the owner of the "
            f"run, are read through a link: give it that owner, or remove the link"
        )
    above = posixpath.dirname(real_path(path))
    is_in_run = any(
        os.path.isdir(posixpath.join(above, name)) for name in (INCARNATIONS, OLD_INCARNATIONS)
    )
    if is_in_run or above == real_path(posixpath.dirname(path)):
        return (
            f"{label}, a checkpoint of the run in {above}, which may remove it: copy it by "
            f"dist-ckpt cp, begin with it by Checkpointer(init=...), or link all of that run"
        )
    return ""


def refuse_linked_step(path: str) -> str:
    """Return the folder of a path's `entry_path`. Raise ExistsError if it is a linked step."""
    entry = entry_path(path)
    if is_linked_step(entry):
        raise ExistsError(
            f"{describe_link(entry)}: nothing is written or removed through the "
            f"link of a step. To free this name, remove the link: rm {shlex.quote(entry)}. To "
            f"change the checkpoint, give its own path: {real_path(entry)}"
        )
    return posixpath.dirname(entry)
