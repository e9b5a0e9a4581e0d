"""Which files of another system lie at a path that a user gives, if any do."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass

from dist_ckpt.core.commit.attempts import attempts_in
from dist_ckpt.core.storage import Storage, open_storage, real_path
from dist_ckpt.errors import CheckpointError, IncompatibleError, NotFoundError
from dist_ckpt.interop.dcp import read as dcp_files
from dist_ckpt.interop.frameworks import accelerate, deepspeed, lightning, megatron
from dist_ckpt.interop.hf import read as safetensors_files
from dist_ckpt.interop.readers.nested_state import ALL, ImportFilter
from dist_ckpt.interop.readers.virtual_checkpoint import ForeignState, checkpoint_of
from dist_ckpt.interop.torch_save import read as torch_files

# How a zip archive begins, and a pickle: torch.save writes the one, and once wrote the other.
_PICKLED = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")

# A way to read what lies at a path as a checkpoint.
Opener = Callable[[str | os.PathLike[str]], tuple[Storage, str]]


def open_source(path: str | os.PathLike[str], *, direct_reads: bool = False) -> tuple[Storage, str]:
    """Return what `open_storage` does, or what `foreign_at` finds, for who reads a checkpoint."""
    storage, text = open_storage(path, direct_reads=direct_reads)
    return foreign_at(storage, text) or storage, text


def opener_of_dcp(needs: Callable[[str], bool]) -> Opener:
    """Return what opens folders of torch.distributed.checkpoint; see `ImportFilter.needs`."""
    return lambda path: open_pickled("dcp", path, ImportFilter(needs=needs))


@dataclass(frozen=True, slots=True)
class _Format:
    """What another system pickles: what it is called, and what reads it where it lies."""

    name: str
    read: Callable[[Storage, str, ImportFilter], ForeignState]


# By what `dist-ckpt import --from` takes.
_FORMATS: Mapping[str, _Format] = {
    "dcp": _Format("a folder of torch.distributed.checkpoint", dcp_files.read_folder),
    "torch": _Format("a file of torch.save", torch_files.read_file),
    "lightning": _Format("a checkpoint of Lightning", lightning.read),
    "accelerate": _Format("a folder of accelerate", accelerate.read),
    "deepspeed": _Format("a folder of DeepSpeed", deepspeed.read),
    "megatron": _Format("a folder of Megatron", megatron.read),
}


def open_pickled(
    kind: str, path: str | os.PathLike[str], interest: ImportFilter = ALL
) -> tuple[Storage, str]:
    """Return what reads the files of a format as a checkpoint, and its path."""
    storage, text = open_storage(path)
    found = _FORMATS[kind]
    return checkpoint_of(storage, text, found.read(storage, text, interest), found.name), text


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


def foreign_at(storage: Storage, path: str) -> Storage | None:
    """Return what reads the files of another system at `path` as a checkpoint there, else None.

    A safetensors file, or a folder of them as Hugging Face writes it. A checkpoint of ours is that,
    whatever else lies in its folder. IncompatibleError, with what to do, for files that only their
    own library may read. CorruptError, NotFoundError for what is damaged, or lacks files.
    """
    if (start := _start_of(storage, path)) is not None:
        return _in_file(storage, path, start)
    try:
        is_ours = any(attempts_in(storage.list(path)))
    except (FileNotFoundError, NotADirectoryError, CheckpointError):
        return None  # who looks for a checkpoint there says why
    return None if is_ours else _in_folder(storage, path)


def _in_file(storage: Storage, path: str, start: bytes) -> Storage | None:
    if path.endswith(safetensors_files.SUFFIX):
        found = safetensors_files.read_file(storage, path)
        return checkpoint_of(storage, path, found, "a safetensors file")
    if start.startswith(_PICKLED):
        raise _to_import("lightning" if path.endswith(".ckpt") else "torch", path)
    return None


def _in_folder(storage: Storage, path: str) -> Storage | None:
    if (kind := _pickled_kind(storage, path)) is not None:
        raise _to_import(kind, path)
    if _start_of(storage, f"{path}/{safetensors_files.INDEX}") is not None:
        found = safetensors_files.read_folder(storage, path)
        return checkpoint_of(storage, path, found, "a folder of safetensors files")
    one = f"{path}/{safetensors_files.ONE_FILE}"
    if _start_of(storage, one) is not None:
        found = safetensors_files.read_file(storage, one)
        return checkpoint_of(storage, path, found, "a folder with a safetensors file")
    if _start_of(storage, f"{path}/{dcp_files.METADATA}") is not None:
        raise IncompatibleError(
            f"{path} is a folder of torch.distributed.checkpoint: load it with "
            f"dist_ckpt.interop.dcp.load, or make a checkpoint of it with "
            f"`dist-ckpt import --from dcp {path} TARGET`; both unpickle nothing"
        )
    return None


def _pickled_kind(storage: Storage, path: str) -> str | None:
    """Return which system has written a folder, if its files say so."""

    def has(*names: str) -> bool:
        return any(_start_of(storage, f"{path}/{name}") is not None for name in names)

    if has(lightning.META) and has(dcp_files.METADATA):
        return "lightning"
    if has(dcp_files.METADATA_OF_RANK) and not has(dcp_files.METADATA):
        raise dcp_files.no_metadata(storage, path)
    if has(megatron.LATEST) or (has(megatron.ABOUT) and has(megatron.COMMON)):
        return "megatron"
    if has("random_states_0.pkl"):
        return "accelerate"
    return "deepspeed" if deepspeed.is_folder(storage, path) else None


def _to_import(kind: str, path: str) -> IncompatibleError:
    return IncompatibleError(
        f"{path} is {_FORMATS[kind].name}: make a checkpoint of it with "
        f"`dist-ckpt import --from {kind} {path} TARGET`, which unpickles nothing"
    )


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
