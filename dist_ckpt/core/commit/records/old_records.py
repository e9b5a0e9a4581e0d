"""Records of dist_ckpt 0.1.0 in a root: they are read, and nothing is written next to them.

    <root>/.facts     now `.annotations`
    <root>/.starts    now `.incarnations`, with other names of fields

A job of 0.1.0 does not see the new folders, so a pin there would not keep a checkpoint from it.
`dist-ckpt upgrade` converts both folders; until then every write and removal is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import cache

from dist_ckpt.core.format.filenames import OLD_ANNOTATIONS, OLD_INCARNATIONS
from dist_ckpt.core.storage import Entry, Storage
from dist_ckpt.errors import IncompatibleError

_log = logging.getLogger("dist_ckpt")

OLD_FOLDERS = (OLD_ANNOTATIONS, OLD_INCARNATIONS)


def old_folders_in(entries: Iterable[Entry]) -> tuple[str, ...]:
    """Return the names of the old folders among the entries of a root."""
    names = {entry.name for entry in entries if entry.kind == "folder"}
    return tuple(name for name in OLD_FOLDERS if name in names)


def find_old_folders(
    storage: Storage, root: str, names: Iterable[str] = OLD_FOLDERS
) -> tuple[str, ...]:
    """Return the names of the old folders in a root.

    Costs one listing each of a missing folder: cheaper than listing a root of a thousand
    checkpoints.
    """
    return tuple(name for name in names if _is_folder(storage, f"{root.rstrip('/')}/{name}"))


def _is_folder(storage: Storage, path: str) -> bool:
    try:
        storage.list(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def check_upgraded(storage: Storage, root: str) -> None:
    """Raise IncompatibleError if a root has old records: call it before anything is written."""
    refuse_old(root, find_old_folders(storage, root))


def refuse_old(root: str, folders: tuple[str, ...]) -> None:
    """Raise IncompatibleError if a root has these old folders; do nothing for ()."""
    if folders:
        raise IncompatibleError(
            f"{root}: {_named(folders)} of dist_ckpt 0.1.0, so nothing is written or removed here. "
            f"End the jobs of 0.1.0 that use this root, then run `dist-ckpt upgrade {root}`"
        )


@cache
def warn_of_old(root: str, folders: tuple[str, ...]) -> None:
    """Log once for each process that a root needs an upgrade; do nothing for ()."""
    if folders:
        _log.warning(
            "%s: %s of dist_ckpt 0.1.0, which can only be read. Run `dist-ckpt upgrade %s`",
            *(root, _named(folders), root),
        )


def _named(folders: tuple[str, ...]) -> str:
    verb = "is" if len(folders) == 1 else "are"
    return f"{' and '.join(folders)} {verb}"
