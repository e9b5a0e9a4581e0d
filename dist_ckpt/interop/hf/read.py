"""safetensors files, one or a folder of them as Hugging Face writes it, as the state of a model.

A header is JSON from anybody: it is parsed within bounds, and every number in it is held against
the file. The format: https://huggingface.co/docs/safetensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from math import prod

from dist_ckpt.core.format import strict_json
from dist_ckpt.core.format.dtypes import DTYPES
from dist_ckpt.core.format.geometry import Region
from dist_ckpt.core.format.index.catalog_json import MAX_FQN_CHARS
from dist_ckpt.core.format.index.index import Node
from dist_ckpt.core.format.strict_json import Json
from dist_ckpt.core.storage import Storage, real_path
from dist_ckpt.errors import CorruptError, IncompatibleError, NotFoundError, listed
from dist_ckpt.interop.readers.virtual_checkpoint import (
    ForeignChunk,
    ForeignState,
    ForeignTensor,
    checkpoint_of,
)
from dist_ckpt.interop.registry import HF_FILE, HF_INDEX, SAFETENSORS

# What the tensors of such files are parts of, as in `{"model": model}`.
MODEL = "model"

INDEX, ONE_FILE, SUFFIX = HF_INDEX, HF_FILE, SAFETENSORS

# What safetensors itself reads of a header, and more than any index has.
MAX_HEADER_NBYTES = 100_000_000
MAX_INDEX_NBYTES = 256 << 20

_BY_CODE = {dtype.safetensors: dtype for dtype in DTYPES.values() if dtype.safetensors}
_MOST_DIMENSIONS = 64
MAX_NAME_CHARS = MAX_FQN_CHARS - len(f"{MODEL}.")


def open_file(storage: Storage, path: str, file: str) -> Storage:
    """Return what reads a file, which may be the one of a folder, as a checkpoint at `path`."""
    what = "a safetensors file" if file == path else "a folder with a safetensors file"
    return checkpoint_of(storage, path, read_file(storage, file), what)


def open_folder(storage: Storage, path: str) -> Storage:
    """Return what reads the files of a folder with an index as a checkpoint."""
    return checkpoint_of(storage, path, read_folder(storage, path), "a folder of safetensors files")


def read_file(storage: Storage, path: str) -> ForeignState:
    """Return what one file holds. CorruptError, IncompatibleError for what is no such file."""
    tensors, metadata = _header_of(storage, path)
    return _state(tensors, metadata)


def read_folder(storage: Storage, folder: str) -> ForeignState:
    """Return what the files hold that the index of a folder names.

    NotFoundError names the files that are not there, CorruptError what the index is wrong about.
    """
    path = f"{folder}/{INDEX}"
    index = _object(_json_of(storage, path, MAX_INDEX_NBYTES), path)
    names = {
        name: _file_name(file, path)
        for name, file in _object(index.get("weight_map"), f"{path}, weight_map").items()
    }
    if not names:
        raise CorruptError(f"{path} names no tensor; fetch it anew")
    tensors: list[ForeignTensor] = []
    gone = []
    for file in sorted(set(names.values())):
        try:
            in_file, _ = _header_of(storage, f"{folder}/{file}")
        except NotFoundError:
            gone.append(file)
            continue
        tensors += [tensor for tensor in in_file if names.get(tensor.fqn) == file]
    if gone:
        raise NotFoundError(f"{path} names files that are not there: {listed(gone)}; fetch them")
    if lacking := sorted(names.keys() - {tensor.fqn for tensor in tensors}):
        raise CorruptError(
            f"{path} names tensors that their files lack: {listed(lacking)}; fetch the files anew"
        )
    metadata = index.get("metadata")
    return _state(tensors, metadata if isinstance(metadata, dict) else {})


def _state(tensors: Sequence[ForeignTensor], metadata: Mapping[str, Json]) -> ForeignState:
    named = [
        ForeignTensor(f"{MODEL}.{entry.fqn}", entry.dtype, entry.shape, entry.chunks)
        for entry in tensors
    ]
    tree = (
        Node("", "dict", (MODEL,)),
        Node(MODEL, "dict", tuple(tensor.fqn for tensor in tensors)),
    )
    return ForeignState(named, tree, {}, dict(metadata))


def _header_of(storage: Storage, path: str) -> tuple[list[ForeignTensor], dict[str, Json]]:
    """Return the tensors of a file, and what it says of itself."""
    try:
        file = storage.open(real_path(path))
    except FileNotFoundError:
        raise NotFoundError(f"{path}: there is no such file") from None
    with closing(file):
        size = memoryview(bytearray(8))
        count = file.read_into(0, size)
        nbytes = int.from_bytes(size, "little")
        if count < 8 or not 2 <= nbytes <= min(MAX_HEADER_NBYTES, file.nbytes - 8):
            raise CorruptError(f"{path}: no safetensors file: no header fits into it")
        header = bytearray(nbytes)
        if file.read_into(8, memoryview(header)) < nbytes:
            raise CorruptError(f"{path} ended while it was read")
        total = file.nbytes
    doc = _object(strict_json.parse(bytes(header).rstrip(b" "), path), path)
    metadata = _object(doc.pop("__metadata__", {}), f"{path}, __metadata__")
    _check_foreign(metadata, path)
    tensors = [_tensor(name, doc[name], path, 8 + nbytes, total) for name in doc]
    _check_apart(tensors, path)
    return tensors, metadata


def _check_apart(tensors: Sequence[ForeignTensor], path: str) -> None:
    """Raise CorruptError if two tensors have bytes in common: a short file would become long."""
    end, last = 0, ""
    for start, nbytes, name in sorted(map(_place_of, tensors)):
        if nbytes and start < end:
            raise CorruptError(
                f"{path}: {strict_json.quoted(last)} and {strict_json.quoted(name)} have bytes in "
                f"common; fetch the file anew"
            )
        end, last = max(end, start + nbytes), name


def _place_of(tensor: ForeignTensor) -> tuple[int, int, str]:
    nbytes = prod(tensor.shape) * DTYPES[tensor.dtype].itemsize
    return tensor.chunks[0].start, nbytes, tensor.fqn


def _check_foreign(metadata: Mapping[str, Json], path: str) -> None:
    if "dist_ckpt_index" in metadata:
        raise IncompatibleError(
            f"{path} is the bytes of a state: dist_ckpt.load_bytes(state, data) reads them"
        )
    if "dist_ckpt" in metadata:
        raise IncompatibleError(
            f"{path} is one file of a checkpoint of dist_ckpt: give the checkpoint's folder"
        )


def _tensor(name: str, value: Json, path: str, start: int, total: int) -> ForeignTensor:
    what = f"{path}, {strict_json.quoted(name)}"
    entry = _object(value, what)
    code, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    dtype = _BY_CODE.get(code) if isinstance(code, str) else None
    if dtype is None:
        known = ", ".join(sorted(_BY_CODE))
        raise IncompatibleError(
            f"{what}: the dtype {strict_json.quoted(code)} is not one of those that are read here "
            f"({known}): convert it with the library that wrote it"
        )
    sizes = tuple(_numbers(shape, f"{what}, shape"))
    position = tuple(_numbers(offsets, f"{what}, data_offsets"))
    if len(sizes) > _MOST_DIMENSIONS or len(position) != 2 or not 0 < len(name) <= MAX_NAME_CHARS:
        raise CorruptError(f"{what}: no tensor of a safetensors file; fetch the file anew")
    first, stop = position
    if stop - first != prod(sizes) * dtype.itemsize or start + stop > total:
        raise CorruptError(
            f"{what}: {list(sizes)} of {code} cannot be the bytes {first}:{stop} of "
            f"{total - start}; fetch the file anew"
        )
    chunk = ForeignChunk(Region.whole(sizes), path, start + first)
    return ForeignTensor(name, dtype.name, sizes, (chunk,))


def _numbers(value: Json, what: str) -> Iterator[int]:
    if not isinstance(value, list):
        raise CorruptError(f"{what}: {strict_json.quoted(value)} is no list of numbers")
    for number in value:
        if type(number) is not int or not 0 <= number < 1 << 63:
            raise CorruptError(f"{what}: {strict_json.quoted(number)} is no size")
        yield number


def _file_name(value: Json, path: str) -> str:
    if not isinstance(value, str) or not value or {"/", "\0"} & {*value} or value in (".", ".."):
        raise CorruptError(
            f"{path} names the file {strict_json.quoted(value)}: a file beside it must be meant"
        )
    return value


def _json_of(storage: Storage, path: str, most: int) -> Json:
    try:
        file = storage.open(real_path(path))
    except FileNotFoundError:
        raise NotFoundError(f"{path}: there is no such file") from None
    with closing(file):
        if file.nbytes > most:
            raise CorruptError(f"{path}: no index has {file.nbytes} bytes")
        data = bytearray(file.nbytes)
        count = file.read_into(0, memoryview(data))
    return strict_json.parse(bytes(data[:count]), path)


def _object(value: Json, what: str) -> dict[str, Json]:
    if not isinstance(value, dict):
        raise CorruptError(f"{what}: {strict_json.quoted(value)} is no object of JSON")
    return value
