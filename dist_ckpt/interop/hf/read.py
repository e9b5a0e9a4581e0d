"""Read a safetensors file, or a Hugging Face folder of them, as the state of a model.

A header may be hostile: its JSON is parsed within limits, and its numbers must fit the file. The
format is in https://huggingface.co/docs/safetensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from math import prod

from dist_ckpt.core.format import strict_json
from dist_ckpt.core.format.dtypes import DTYPES
from dist_ckpt.core.format.geometry import Region
from dist_ckpt.core.format.index.index import Node
from dist_ckpt.core.format.index.index_json import MAX_FQN_CHARS
from dist_ckpt.core.format.strict_json import Json
from dist_ckpt.core.storage import Storage
from dist_ckpt.errors import CorruptError, IncompatibleError, NotFoundError
from dist_ckpt.interop.readers.virtual_checkpoint import (
    MODEL,
    ForeignChunk,
    ForeignState,
    ForeignTensor,
    build_virtual_checkpoint,
)
from dist_ckpt.interop.registry import HF_INDEX, open_file, read_bytes
from dist_ckpt.message_text import names_around_remedy

MAX_HEADER_NBYTES = 100_000_000  # the limit of the safetensors library
_MAX_INDEX_NBYTES = 256 << 20  # more than any index has

_DTYPES = {dtype.safetensors: dtype for dtype in DTYPES.values() if dtype.safetensors}
_MAX_NDIM = 64
_MAX_NAME_CHARS = MAX_FQN_CHARS - len(f"{MODEL}.")


def open_safetensors(storage: Storage, path: str, file: str | None) -> Storage:
    """Return a storage that presents a file, or a folder's only file, as a checkpoint at `path`.

    `file` is None for a folder with an index.
    """
    if file is None:
        state, label = read_folder(storage, path), "a folder of safetensors files"
    else:
        state = read_file(storage, file)
        label = "a safetensors file" if file == path else "a folder with a safetensors file"
    return build_virtual_checkpoint(storage, path, state, label)


def read_file(storage: Storage, path: str) -> ForeignState:
    """Return the state in one file. CorruptError, IncompatibleError for another kind of file."""
    return _build_state(*_read_header(storage, path))


def read_folder(storage: Storage, folder: str) -> ForeignState:
    """Return the state in the files that a folder's index names.

    NotFoundError names missing files, CorruptError the tensors that no file contains.
    """
    path = f"{folder}/{HF_INDEX}"
    data = read_bytes(storage, path, _MAX_INDEX_NBYTES)
    index = _expect_object(strict_json.parse(data, path), path)
    weight_map = _expect_object(index.get("weight_map"), f"{path}, weight_map")
    names = {name: _check_file_name(file, path) for name, file in weight_map.items()}
    if not names:
        raise CorruptError(f"{path} names no tensor; fetch it again")
    tensors: list[ForeignTensor] = []
    missing_files = []
    for file in sorted(set(names.values())):
        try:
            in_file, _ = _read_header(storage, f"{folder}/{file}")
        except NotFoundError:
            missing_files.append(file)
            continue
        tensors += [tensor for tensor in in_file if names.get(tensor.fqn) == file]
    if missing_files:
        text, rest = names_around_remedy(missing_files)
        raise NotFoundError(f"{path} names files that do not exist: {text}; fetch them{rest}")
    if missing := sorted(names.keys() - {tensor.fqn for tensor in tensors}):
        text, rest = names_around_remedy(missing)
        raise CorruptError(
            f"{path} names tensors that their files lack: {text}; fetch the files again{rest}"
        )
    metadata = index.get("metadata")
    return _build_state(tensors, metadata if isinstance(metadata, dict) else {})


def _build_state(tensors: Sequence[ForeignTensor], metadata: Mapping[str, Json]) -> ForeignState:
    named = [replace(tensor, fqn=f"{MODEL}.{tensor.fqn}") for tensor in tensors]
    names = tuple(tensor.fqn for tensor in tensors)
    tree = (Node("", "dict", (MODEL,)), Node(MODEL, "dict", names))
    return ForeignState(named, tree, {}, dict(metadata))


def _read_header(storage: Storage, path: str) -> tuple[list[ForeignTensor], dict[str, Json]]:
    """Return the tensors of a file, and its metadata."""
    with closing(open_file(storage, path)) as file:
        size = memoryview(bytearray(8))
        count = file.read_into(0, size)
        nbytes = int.from_bytes(size, "little")
        if count < 8 or not 2 <= nbytes <= min(MAX_HEADER_NBYTES, file.nbytes - 8):
            raise CorruptError(f"{path}: not a safetensors file: it has no complete header")
        header = bytearray(nbytes)
        if file.read_into(8, memoryview(header)) < nbytes:
            raise CorruptError(f"{path} was truncated while it was read")
        total = file.nbytes
    doc = _expect_object(strict_json.parse(bytes(header).rstrip(b" "), path), path)
    metadata = _expect_object(doc.pop("__metadata__", {}), f"{path}, __metadata__")
    if "dist_ckpt_index" in metadata:
        raise IncompatibleError(
            f"{path} has the bytes of a state: read them with dist_ckpt.load_bytes(state, data)"
        )
    if "dist_ckpt" in metadata:
        raise IncompatibleError(
            f"{path} is one file of a dist_ckpt checkpoint: give the checkpoint's folder"
        )
    tensors = [_parse_tensor(name, doc[name], path, 8 + nbytes, total) for name in doc]
    _check_offsets(tensors, path, 8 + nbytes, total)
    return tensors, metadata


def _check_offsets(tensors: Sequence[ForeignTensor], path: str, start: int, total: int) -> None:
    """Raise CorruptError unless every byte after the header belongs to exactly one tensor.

    The safetensors library refuses the same files. They have no checksums, so this detects some
    damage: a file that is too long, or a header of another file.
    """
    spans = sorted(
        (tensor.chunks[0].start, prod(tensor.shape) * DTYPES[tensor.dtype].itemsize, tensor.fqn)
        for tensor in tensors
    )
    end, last = start, "the header"
    remedy = "fetch the file again"
    for first, nbytes, fqn in spans:
        name = strict_json.quote(fqn)
        if first < end:
            raise CorruptError(f"{path}: {last} and {name} have common bytes; {remedy}")
        if first > end:
            gap = f"{first - end} bytes between {last} and {name}"
            raise CorruptError(f"{path}: {gap} belong to no tensor; {remedy}")
        end, last = first + nbytes, name
    if end < total:
        raise CorruptError(f"{path}: {total - end} bytes after its last tensor, {last}; {remedy}")


def _parse_tensor(name: str, value: Json, path: str, start: int, total: int) -> ForeignTensor:
    label = f"{path}, {strict_json.quote(name)}"
    entry = _expect_object(value, label)
    code, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    dtype = _DTYPES.get(code) if isinstance(code, str) else None
    if dtype is None:
        raise IncompatibleError(
            f"{label}: the dtype {strict_json.quote(code)} is not supported "
            f"({', '.join(sorted(_DTYPES))}): convert it with the library that wrote it"
        )
    sizes = tuple(_parse_sizes(shape, f"{label}, shape"))
    position = tuple(_parse_sizes(offsets, f"{label}, data_offsets"))
    if len(sizes) > _MAX_NDIM or len(position) != 2 or not 0 < len(name) <= _MAX_NAME_CHARS:
        raise CorruptError(f"{label}: not a tensor of a safetensors file; fetch the file again")
    first, stop = position
    if stop - first != prod(sizes) * dtype.itemsize or start + stop > total:
        raise CorruptError(
            f"{label}: {list(sizes)} of {code} cannot be the bytes {first}:{stop} of "
            f"{total - start}; fetch the file again"
        )
    chunk = ForeignChunk(Region.whole(sizes), path, start + first)
    return ForeignTensor(name, dtype.name, sizes, (chunk,))


def _parse_sizes(value: Json, label: str) -> Iterator[int]:
    if not isinstance(value, list):
        raise CorruptError(f"{label}: {strict_json.quote(value)} is not a list of numbers")
    for number in value:
        if type(number) is not int or not 0 <= number < 1 << 63:
            raise CorruptError(f"{label}: {strict_json.quote(number)} is not a size")
        yield number


def _check_file_name(value: Json, path: str) -> str:
    if not isinstance(value, str) or not value or {"/", "\0"} & {*value} or value in (".", ".."):
        raise CorruptError(
            f"{path} names the file {strict_json.quote(value)}, which is not in the same folder"
        )
    return value


def _expect_object(value: Json, label: str) -> dict[str, Json]:
    if not isinstance(value, dict):
        raise CorruptError(f"{label}: {strict_json.quote(value)} is not a JSON object")
    return value
