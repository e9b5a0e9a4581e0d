"""Storages that make no links, and small checkpoints to be linked from."""

from __future__ import annotations

import errno
from pathlib import Path

import torch

from dist_ckpt.core.commit.attempts import find_checkpoint
from dist_ckpt.core.format.index.index import Index
from dist_ckpt.core.storage import Storage
from dist_ckpt.core.storage.storage_wrappers import ForwardingStorage
from dist_ckpt.errors import NotFoundError, StorageError
from ranks import load_on_threads, save_on_threads

ROOT = "/runs"
PATH = f"{ROOT}/s1"


class NoLinks(ForwardingStorage):
    """Refuses to link, as a storage without links does."""

    def link(self, old: str, new: str) -> None:
        raise StorageError(f"{new}: {errno.errorcode[errno.EXDEV]}: no links here, of {old}")


def state(number: int) -> dict[str, object]:
    """Return a state of two components, every number of which is this one."""
    return {
        "model": {"w": torch.full((7, 10), float(number)), "b": torch.full((3,), number)},
        "optim": {"m": torch.full((5,), float(number))},
        "lr": number,
    }


def save(storage: Storage, number: int, path: str = PATH, step: int | None = 1) -> Index:
    """Save a state; return the index."""
    save_on_threads(storage, [state(number)], path, step=step)
    return find_checkpoint(storage, path)[1]


def number_at(storage: Storage, path: str) -> int | None:
    """Return the number of the state that is there, all of it, or None if there is none."""
    loaded: dict[str, object] = {}
    try:
        load_on_threads(storage, [loaded], path)
    except NotFoundError:
        return None
    number = loaded.pop("lr")
    assert isinstance(number, int)
    wanted = state(number)
    for component in ("model", "optim"):
        tensors, there = wanted[component], loaded[component]
        assert isinstance(tensors, dict)
        assert isinstance(there, dict)
        assert tensors.keys() == there.keys()
        assert all(torch.equal(tensors[name], there[name]) for name in tensors)
    return number


def inodes(path: str | Path) -> dict[str, int]:
    """Return which inodes the data files of the newest attempt at a local path have."""
    folder = max(Path(path).glob("a*"), key=lambda one: int(one.name[1:].split("-")[0]))
    files = [one for one in folder.iterdir() if one.suffix in (".safetensors", ".msgpack")]
    return {file.name: file.stat().st_ino for file in sorted(files)}
