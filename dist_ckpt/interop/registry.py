"""Detect files of another system at a path, and select their reader.

A table lists the marker files and the reader module of each system. A reader is imported by name
only when its marker exists: loading a dist_ckpt checkpoint imports no reader.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection
from contextlib import closing
from dataclasses import dataclass
from types import ModuleType

from dist_ckpt.core.commit.attempts import parse_attempts
from dist_ckpt.core.storage import Storage, real_path
from dist_ckpt.errors import CheckpointError, IncompatibleError

SAFETENSORS = ".safetensors"
HF_INDEX = "model.safetensors.index.json"
HF_FILE = "model.safetensors"
DCP_METADATA = ".metadata"
DCP_METADATA_OF_RANK = "__0.metadata"
DEEPSPEED_LATEST = "latest"
DEEPSPEED_STATES = "_states.pt"
LIGHTNING_META = "meta.pt"
MEGATRON_LATEST = "latest_checkpointed_iteration.txt"
MEGATRON_ABOUT = "metadata.json"
MEGATRON_COMMON = "common.pt"

# First bytes of a zip archive and of pickles: torch.save writes zip, old versions wrote pickles.
_PICKLED = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")


@dataclass(frozen=True, slots=True)
class ForeignFormat:
    """A pickled format of another system: its description, and the module with its `read`."""

    name: str
    reader: str


# By the value of `dist-ckpt import --from`.
FORMATS = {
    "dcp": ForeignFormat("a folder of torch.distributed.checkpoint", "dcp.read"),
    "torch": ForeignFormat("a file of torch.save", "torch_save.read"),
    "lightning": ForeignFormat("a checkpoint of Lightning", "frameworks.lightning"),
    "accelerate": ForeignFormat("a folder of accelerate", "frameworks.accelerate"),
    "deepspeed": ForeignFormat("a folder of DeepSpeed", "frameworks.deepspeed"),
    "megatron": ForeignFormat("a folder of Megatron", "frameworks.megatron"),
}

# A folder with all of these files has that format; the first match counts.
_FOLDERS = (
    ((LIGHTNING_META, DCP_METADATA), "lightning"),
    ((MEGATRON_LATEST,), "megatron"),
    ((MEGATRON_ABOUT, MEGATRON_COMMON), "megatron"),
    (("random_states_0.pkl",), "accelerate"),
)


def reader_module(name: str) -> ModuleType:
    """Return the module of a reader, imported now."""
    return importlib.import_module(f"{__package__}.{name}")


def foreign_at(storage: Storage, path: str) -> Storage | None:
    """Return a storage that presents another system's files at `path` as a checkpoint, or None.

    These are a safetensors file, or a folder of them as Hugging Face writes it. A folder with
    attempts of dist_ckpt is always a dist_ckpt checkpoint. IncompatibleError, with the remedy, for
    files that must be imported. CorruptError, NotFoundError for damaged or missing files.
    """
    if (start := _start_of(storage, path)) is not None:
        if path.endswith(SAFETENSORS):
            return _open_safetensors(storage, path, path)
        if start.startswith(_PICKLED):
            raise _to_import("lightning" if path.endswith(".ckpt") else "torch", path)
        return None
    try:
        entries = storage.list(path)
        is_ours = any(parse_attempts(entries))
    except (FileNotFoundError, NotADirectoryError, CheckpointError):
        return None  # the caller that opens the checkpoint reports the reason
    return None if is_ours else _in_folder(storage, path, [entry.name for entry in entries])


def _in_folder(storage: Storage, path: str, names: Collection[str]) -> Storage | None:
    if _has(storage, path, DCP_METADATA_OF_RANK) and not _has(storage, path, DCP_METADATA):
        raise reader_module("dcp.read").no_metadata(storage, path)
    for markers, kind in _FOLDERS:
        if _has(storage, path, *markers):
            raise _to_import(kind, path)
    has_marker = any(n == DEEPSPEED_LATEST or n.endswith(DEEPSPEED_STATES) for n in names)
    if has_marker and reader_module("frameworks.deepspeed").is_folder(storage, path):
        raise _to_import("deepspeed", path)
    if _has(storage, path, HF_INDEX):
        return _open_safetensors(storage, path, None)
    if _has(storage, path, HF_FILE):
        return _open_safetensors(storage, path, f"{path}/{HF_FILE}")
    if _has(storage, path, DCP_METADATA):
        raise IncompatibleError(
            f"{path} is {FORMATS['dcp'].name}: load it with "
            f"dist_ckpt.interop.dcp.load, or convert it with "
            f"`dist-ckpt import --from dcp {path} TARGET`; both unpickle nothing"
        )
    return None


def _open_safetensors(storage: Storage, path: str, file: str | None) -> Storage:
    """Present a file as a checkpoint at `path`, or the folder there if `file` is None."""
    opened: Storage = reader_module("hf.read").open_safetensors(storage, path, file)
    return opened


def _to_import(kind: str, path: str) -> IncompatibleError:
    return IncompatibleError(
        f"{path} is {FORMATS[kind].name}: convert it to a checkpoint with "
        f"`dist-ckpt import --from {kind} {path} TARGET`, which unpickles nothing"
    )


def _has(storage: Storage, path: str, *names: str) -> bool:
    return all(_start_of(storage, f"{path}/{name}") is not None for name in names)


def _start_of(storage: Storage, path: str) -> bytes | None:
    """Return the first bytes of a file; None if the file does not exist."""
    try:
        # Follow links: all files in the Hugging Face cache are links.
        file = storage.open(real_path(path))
    except (FileNotFoundError, NotADirectoryError, CheckpointError):
        return None
    with closing(file):
        start = bytearray(4)
        return bytes(start[: file.read_into(0, memoryview(start))])
