"""Which files of another system lie at a path that a user gives, if any do."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing

from dist_ckpt.errors import CheckpointError, IncompatibleError, NotFoundError
from dist_ckpt.foreign import dcp_files, safetensors_files, torch_files
from dist_ckpt.foreign.virtual_checkpoint import ForeignState, checkpoint_of
from dist_ckpt.storage import Storage, open_storage, real_path

# How a zip archive begins, and a pickle: torch.save writes the one, and once wrote the other.
_PICKLED = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")

# A way to read what lies at a path as a checkpoint.
Opener = Callable[[str | os.PathLike[str]], tuple[Storage, str]]


def open_source(path: str | os.PathLike[str], *, direct_reads: bool = False) -> tuple[Storage, str]:
    """Return what `open_storage` does, or what `foreign_at` finds, for who reads a checkpoint."""
    storage, text = open_storage(path, direct_reads=direct_reads)
    return foreign_at(storage, text) or storage, text


def open_dcp_folder(path: str | os.PathLike[str]) -> tuple[Storage, str]:
    """Return what reads a folder of torch.distributed.checkpoint as a checkpoint, and its path."""
    return _opened(path, dcp_files.read_folder, "a folder of torch.distributed.checkpoint")


def open_torch_file(path: str | os.PathLike[str]) -> tuple[Storage, str]:
    """Return what reads a file of torch.save as a checkpoint, and its path."""
    return _opened(path, torch_files.read_file, "a file of torch.save")


def open_safetensors(path: str | os.PathLike[str]) -> tuple[Storage, str]:
    """Return what reads safetensors files as a checkpoint. IncompatibleError if these are none."""
    storage, text = open_storage(path)
    if (found := foreign_at(storage, text)) is None:
        if not os.path.exists(text):
            raise NotFoundError(f"{text}: there is no such file or folder; check the path")
        raise IncompatibleError(
            f"{text} is no safetensors file, and no folder of them with "
            f"{safetensors_files.INDEX} or {safetensors_files.ONE_FILE}; check the path"
        )
    return found, text


def _opened(
    path: str | os.PathLike[str], read: Callable[[Storage, str], ForeignState], what: str
) -> tuple[Storage, str]:
    storage, text = open_storage(path)
    return checkpoint_of(storage, text, read(storage, text), what), text


def foreign_at(storage: Storage, path: str) -> Storage | None:
    """Return what reads the files of another system at `path` as a checkpoint there, else None.

    A safetensors file, or a folder of them as Hugging Face writes it. IncompatibleError, with what
    to do, for files that only their own library may read. CorruptError, NotFoundError for what is
    damaged, or lacks files.
    """
    if (start := _start_of(storage, path)) is not None:
        if path.endswith(safetensors_files.SUFFIX):
            found = safetensors_files.read_file(storage, path)
            return checkpoint_of(storage, path, found, "a safetensors file")
        if start.startswith(_PICKLED):
            raise IncompatibleError(
                f"{path} is a file of torch.save: make a checkpoint of it with "
                f"`dist-ckpt import --from torch {path} TARGET`, which unpickles nothing"
            )
        return None
    if _start_of(storage, f"{path}/{safetensors_files.INDEX}") is not None:
        found = safetensors_files.read_folder(storage, path)
        return checkpoint_of(storage, path, found, "a folder of safetensors files")
    one = f"{path}/{safetensors_files.ONE_FILE}"
    if _start_of(storage, one) is not None:
        found = safetensors_files.read_file(storage, one)
        return checkpoint_of(storage, path, found, "a folder with a safetensors file")
    if _start_of(storage, f"{path}/.metadata") is not None:
        raise IncompatibleError(
            f"{path} is a folder of torch.distributed.checkpoint: load it with "
            f"dist_ckpt.interop.dcp.load, or make a checkpoint of it with "
            f"`dist-ckpt import --from dcp {path} TARGET`; both unpickle nothing"
        )
    return None


def _start_of(storage: Storage, path: str) -> bytes | None:
    """Return the first bytes of a file; None if there is no file."""
    try:
        # Through links: of what Hugging Face has downloaded all files are some.
        file = storage.open(real_path(path))
    except (FileNotFoundError, NotADirectoryError, CheckpointError):
        return None
    with closing(file):
        start = bytearray(4)
        return bytes(start[: file.read_into(0, memoryview(start))])
