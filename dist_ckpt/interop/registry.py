"""Detect and open the files of other systems, and select their reader.

A table lists the marker files and the reader module of each system. A reader is imported by name
only when its marker exists: loading a dist_ckpt checkpoint imports no reader.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Collection
from contextlib import closing
from dataclasses import dataclass
from types import ModuleType

from dist_ckpt.core.commit.attempts import parse_attempts
from dist_ckpt.core.format import filenames
from dist_ckpt.core.storage import ReadableFile, Storage, real_path
from dist_ckpt.errors import (
    CheckpointError,
    CorruptError,
    IncompatibleError,
    NotFoundError,
    StorageError,
)
from dist_ckpt.message_text import listed

SAFETENSORS = ".safetensors"
HF_INDEX = "model.safetensors.index.json"
HF_FILE = "model.safetensors"
DIFFUSERS_PIPELINE = "model_index.json"
DCP_METADATA = ".metadata"
DCP_METADATA_OF_RANK = "__0.metadata"
DEEPSPEED_LATEST = "latest"
DEEPSPEED_STATES = "_states.pt"
LIGHTNING_META = "meta.pt"
MEGATRON_LATEST = "latest_checkpointed_iteration.txt"
MEGATRON_LATEST_STATE = "latest_train_state.pt"  # the tracker of Megatron Bridge
MEGATRON_STEP = re.compile(r"iter_(\d{7,})")
MEGATRON_ABOUT = "metadata.json"
MEGATRON_COMMON = "common.pt"

# First bytes of a zip archive and of pickles: torch.save writes zip, old versions wrote pickles.
_PICKLE_STARTS = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")


_GGUF_START = b"GGUF"

# The first bytes of a pointer, which Git LFS leaves in place of a large file.
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"


@dataclass(frozen=True, slots=True)
class ForeignFormat:
    """A pickled format of another system: its description, and the module with its `read`."""

    name: str
    reader: str


# By the value of `dist-ckpt import --from`.
FORMATS = {
    "dcp": ForeignFormat("a folder of torch.distributed.checkpoint", "dcp.read"),
    "torch": ForeignFormat("a file of torch.save", "torch_save.read"),
    "lightning": ForeignFormat("a checkpoint of Lightning", "frameworks.read_lightning"),
    "accelerate": ForeignFormat("a folder of accelerate", "frameworks.read_accelerate"),
    "deepspeed": ForeignFormat("a folder of DeepSpeed", "frameworks.read_deepspeed"),
    "megatron": ForeignFormat("a folder of Megatron", "frameworks.read_megatron"),
}

# A folder with all of these files has that format; the first match counts.
_FOLDER_MARKERS = (
    ((LIGHTNING_META, DCP_METADATA), "lightning"),
    ((MEGATRON_LATEST,), "megatron"),
    ((MEGATRON_LATEST_STATE,), "megatron"),
    ((MEGATRON_ABOUT, MEGATRON_COMMON), "megatron"),
    (("random_states_0.pkl",), "accelerate"),
)


# Changes the state that a reader returns.
_StateChange = Callable[..., object]


def reader_module(name: str) -> ModuleType:
    """Return the module of a reader or a writer, imported now."""
    return importlib.import_module(f"{__package__}.{name}")


def open_foreign(
    storage: Storage, path: str, convert: _StateChange | None = None
) -> Storage | None:
    """Return a storage that presents another system's files at `path` as a checkpoint, or None.

    These are a safetensors file, or a folder of them as Hugging Face writes it. A folder with
    attempts of dist_ckpt is always a dist_ckpt checkpoint. IncompatibleError, with the remedy, for
    files that must be imported. CorruptError, NotFoundError for damaged or missing files. `convert`
    changes the state that the files have.
    """
    if (first_bytes := _first_bytes(storage, path)) is not None:
        _check_fetched(first_bytes, path)
        if path.endswith((SAFETENSORS, ".json")) and (
            opened := _open_one_file(storage, path, convert)
        ):
            return opened
        if first_bytes.startswith(_GGUF_START):
            raise IncompatibleError(
                f"{path} is a GGUF file, which is not supported. Load it with transformers, "
                f"from_pretrained(folder, gguf_file=...), and save_pretrained the model"
            )
        if first_bytes.startswith(_PICKLE_STARTS):
            raise _import_error("lightning" if path.endswith(".ckpt") else "torch", path)
        return None
    try:
        entries = storage.list(path)
        is_ours = any(parse_attempts(entries))
    except (FileNotFoundError, NotADirectoryError, CheckpointError):
        return None  # the caller that opens the checkpoint reports the reason
    names = [entry.name for entry in entries]
    return None if is_ours else _open_folder(storage, path, names, convert)


def _open_folder(
    storage: Storage, path: str, names: Collection[str], convert: _StateChange | None
) -> Storage | None:
    def has(name: str) -> bool:
        return is_file(storage, f"{path}/{name}")

    if has(DCP_METADATA_OF_RANK) and not has(DCP_METADATA):
        raise reader_module("dcp.read").missing_metadata_error(storage, path)
    for markers, format_name in _FOLDER_MARKERS:
        if all(map(has, markers)):
            raise _import_error(format_name, path)
    if any(map(MEGATRON_STEP.fullmatch, names)):  # the tracker is lost
        raise _import_error("megatron", path)
    has_marker = any(n == DEEPSPEED_LATEST or n.endswith(DEEPSPEED_STATES) for n in names)
    if has_marker and reader_module("frameworks.read_deepspeed").is_folder(storage, path):
        raise _import_error("deepspeed", path)
    # An attempt of dist_ckpt has such files too: the caller names the folder to pass.
    if filenames.OBJECTS not in names and any(SAFETENSORS in name for name in names):
        opened: Storage | None = reader_module("hf.read").open_folder(storage, path, names, convert)
        if opened is not None:
            return opened
    if has(DCP_METADATA):
        raise ForeignFormatError(
            f"{path} is {FORMATS['dcp'].name}: load it with dist_ckpt.interop.dcp.load, or "
            f"convert it with `dist-ckpt import --from dcp {path} TARGET`; both unpickle nothing",
            "dcp",
        )
    _refuse_folder(storage, path, names)
    return None


def _refuse_folder(storage: Storage, path: str, names: Collection[str]) -> None:
    """Raise IncompatibleError for a folder with models that are in other files, or further down."""
    if any(name.endswith((".bin", ".bin.index.json")) for name in names) and reader_module(
        "readers.model_files"
    ).find_model(names, ".bin", path):
        raise _import_error("torch", path)
    if DIFFUSERS_PIPELINE in names:
        parts = [name for name in sorted(names) if is_file(storage, f"{path}/{name}/config.json")]
        raise IncompatibleError(
            f"{path} is a pipeline of diffusers, with several models: give the folder of one: "
            f"{listed([f'{path}/{name}' for name in parts])}"
        )


def _open_one_file(storage: Storage, path: str, convert: _StateChange | None) -> Storage | None:
    """Present a safetensors file, or those that an index names, as a checkpoint at `path`."""
    model_files = reader_module("readers.model_files")
    name = path.rpartition("/")[2]
    if path.endswith(SAFETENSORS) or model_files.is_index(name, SAFETENSORS):
        opened: Storage = reader_module("hf.read").open_safetensors(storage, path, convert)
        return opened
    if model_files.is_index(name, ".bin"):
        raise _import_error("torch", path)
    return None


class ForeignFormatError(IncompatibleError):
    """The files of another system must be imported. `format_name` is a key of `FORMATS`."""

    def __init__(self, message: str, format_name: str) -> None:
        super().__init__(message)
        self.format_name = format_name


def _import_error(format_name: str, path: str) -> ForeignFormatError:
    return ForeignFormatError(
        f"{path} is {FORMATS[format_name].name}: convert it to a checkpoint with "
        f"`dist-ckpt import --from {format_name} {path} TARGET`, which unpickles nothing",
        format_name,
    )


# --- files -----------------------------------------------------------------------------------


def open_foreign_file(storage: Storage, path: str) -> ReadableFile:
    """Open a file, and follow links: all files in the Hugging Face cache are links.

    NotFoundError if it does not exist, CorruptError if it is not a regular file, or a pointer of
    Git LFS.
    """
    file = _open(storage, path)
    try:
        check_fetched(file, path)
    except BaseException:
        file.close()
        raise
    return file


def check_fetched(file: ReadableFile, path: str) -> None:
    """Raise CorruptError if a file is the pointer that Git LFS leaves in place of it."""
    _check_fetched(_read_start(file, len(_LFS_POINTER)), path)


def _check_fetched(first_bytes: bytes, path: str) -> None:
    if first_bytes.startswith(_LFS_POINTER):
        raise CorruptError(
            f"{path} is a pointer of Git LFS, and not the file itself: fetch the file with "
            f"`git lfs pull`"
        )


def is_shrew_file(storage: Storage, path: str) -> bool:
    """Return True if a `.shrew` file exists at a path."""
    return (_first_bytes(storage, path) or b"").startswith(b"SHRW")


def _open(storage: Storage, path: str) -> ReadableFile:
    try:
        return storage.open(real_path(path))
    except (FileNotFoundError, StorageError) as error:
        if isinstance(error, StorageError) and not isinstance(error.__cause__, NotADirectoryError):
            raise
        raise NotFoundError(f"{path}: the file does not exist; check the path") from None


def read_bytes(storage: Storage, path: str, max_nbytes: int) -> bytes:
    """Return the bytes of a file. CorruptError if it is too large; or as `open_foreign_file`."""
    with closing(open_foreign_file(storage, path)) as file:
        if file.nbytes > max_nbytes:
            raise CorruptError(
                f"{path} has {file.nbytes} bytes, but at most {max_nbytes} are read; fetch it again"
            )
        return _read_start(file, file.nbytes)


def is_file(storage: Storage, path: str) -> bool:
    """Return True if a file exists at a path, and can be opened."""
    return _first_bytes(storage, path) is not None


def _first_bytes(storage: Storage, path: str) -> bytes | None:
    try:
        file = _open(storage, path)
    except CheckpointError:
        return None
    with closing(file):
        return _read_start(file, len(_LFS_POINTER))


def _read_start(file: ReadableFile, nbytes: int) -> bytes:
    data = bytearray(min(nbytes, file.nbytes))
    return bytes(data[: file.read_into(0, memoryview(data))])
