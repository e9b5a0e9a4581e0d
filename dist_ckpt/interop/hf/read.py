"""Read a safetensors file, or a Hugging Face folder of them, as the state of a model.

A header may be hostile: its JSON is parsed within limits, and its numbers must fit the file. The
format is in https://huggingface.co/docs/safetensors.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from math import prod

from dist_ckpt.core.format import strict_json
from dist_ckpt.core.format.dtypes import DTYPES
from dist_ckpt.core.format.geometry import Region, Shape, check_tiling
from dist_ckpt.core.format.index.index import Node
from dist_ckpt.core.format.index.index_json import MAX_FQN_CHARS
from dist_ckpt.core.format.strict_json import Json
from dist_ckpt.core.planning.weight_scales import QUANTIZATION, is_one_byte
from dist_ckpt.core.storage import Storage
from dist_ckpt.errors import CheckpointError, CorruptError, IncompatibleError, NotFoundError
from dist_ckpt.interop.readers.model_files import (
    MAX_INDEX_NBYTES,
    expect_object,
    find_model,
    is_index,
    is_shard,
    parse_index,
)
from dist_ckpt.interop.readers.virtual_checkpoint import (
    MODEL,
    ForeignChunk,
    ForeignState,
    ForeignTensor,
    StateConversion,
    build_virtual_checkpoint,
)
from dist_ckpt.interop.registry import SAFETENSORS, open_foreign_file, read_bytes
from dist_ckpt.message_text import listed, names_around_remedy

MAX_HEADER_NBYTES = 100_000_000  # the limit of the safetensors library

# The metadata of a file in which torch.distributed.checkpoint wrote parts of tensors.
_SHARDING_INFO = "DCP_SHARDING_INFO"

_DTYPES = {dtype.safetensors: dtype for dtype in DTYPES.values() if dtype.safetensors}
# Returns the offset of a part by the tensor's name and the shape of the part.
_FindOffset = Callable[[str, Shape], Shape]

# The files that say how weights are quantized, and where in them.
_CONFIGS = (
    ("config.json", "quantization_config"),
    ("config.json", "compression_config"),
    ("hf_quant_config.json", "quantization"),
)
_MAX_CONFIG_NBYTES = 4 << 20

_MAX_NDIM = 64
_MAX_NAME_CHARS = MAX_FQN_CHARS - len(f"{MODEL}.")


def open_safetensors(
    storage: Storage, path: str, convert: StateConversion | None = None
) -> Storage:
    """Return a storage that presents a file, or the files of an index, as a checkpoint at `path`.

    IncompatibleError for one of several files that have parts of tensors.
    """
    folder, _, name = path.rpartition("/")
    if is_index(name, SAFETENSORS):
        state, label = read_weight_index(storage, path), "the safetensors files of an index"
    else:
        state, label = read_file(storage, path), "a safetensors file"
    state = _add_quantization(storage, folder, state)
    state = state if convert is None else convert(state)
    return build_virtual_checkpoint(storage, path, state, label)


def open_folder(
    storage: Storage, path: str, names: Collection[str], convert: StateConversion | None = None
) -> Storage | None:
    """Return a storage that presents the model in a folder as a checkpoint; None if it has none."""
    model = find_model(names, SAFETENSORS, path)
    if model is None:
        return None
    label = "a folder of safetensors files"
    if model.index is not None:
        state = read_weight_index(storage, f"{path}/{model.index}")
    elif len(model.files) == 1 and not model.is_sharded:
        state = read_file(storage, f"{path}/{model.files[0]}")
        label = "a folder with a safetensors file"
    else:
        state = _read_parts(storage, path, model.files)
    state = _add_quantization(storage, path, state)
    state = state if convert is None else convert(state)
    return build_virtual_checkpoint(storage, path, state, label)


def _add_quantization(storage: Storage, folder: str, state: ForeignState) -> ForeignState:
    """Add what a folder's config.json says of quantization to the metadata, for 8-bit tensors."""
    if not any(is_one_byte(tensor.dtype) for tensor in state.tensors):
        return state
    for file, key in _CONFIGS:
        try:
            data = read_bytes(storage, f"{folder}/{file}", _MAX_CONFIG_NBYTES)
            config = expect_object(strict_json.parse(data, file), file).get(key)
        except CheckpointError:
            continue  # such as NaN in it, which other tools write: the shapes of scales may suffice
        if isinstance(config, dict):
            return replace(state, metadata={**state.metadata, QUANTIZATION: config})
    return state


def read_file(storage: Storage, path: str) -> ForeignState:
    """Return the state in one file. CorruptError, IncompatibleError for another kind of file."""
    tensors, metadata = _read_header(storage, path)
    folder, _, name = path.rpartition("/")
    if is_shard(name) or _find_part(tensors) is not None:
        raise IncompatibleError(
            f"{path} has parts of tensors, which the Hugging Face writer of "
            f"torch.distributed.checkpoint left in several files: give their folder, {folder}"
        )
    return _build_state(tensors, metadata)


def read_weight_index(storage: Storage, path: str) -> ForeignState:
    """Return the state in the files that an index names.

    NotFoundError names missing files, CorruptError the tensors that no file contains.
    """
    folder = path.rpartition("/")[0]
    names, metadata = parse_index(read_bytes(storage, path, MAX_INDEX_NBYTES), path)
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
            f"{path} names tensors that their files lack: {text}; fetch the files again. If DCP "
            f"has written them on several ranks, save again with save_distributed=True{rest}"
        )
    if (part := _find_part(tensors)) is not None:
        raise IncompatibleError(
            f"{path} names whole tensors, but {part.chunks[0].file} has only a part of {part.fqn}: "
            f"ranks have overwritten files of each other. Save again with save_distributed=True"
        )
    return _build_state(tensors, metadata)


# --- parts of tensors --------------------------------------------------------------------------


def _find_part(tensors: Iterable[ForeignTensor]) -> ForeignTensor | None:
    """Return a tensor of one file that begins after the first element of the whole tensor."""
    return next((t for t in tensors if t.chunks[0].cell != Region.whole(t.shape)), None)


def _read_parts(storage: Storage, folder: str, files: Sequence[str]) -> ForeignState:
    """Return the state in files without an index, some of whose tensors may be in several files.

    A tensor ends where the last of its parts ends. NotFoundError if there are gaps between them,
    IncompatibleError if two files have the same elements.
    """
    parts: dict[str, list[ForeignTensor]] = {}
    for file in files:
        for tensor in _read_header(storage, f"{folder}/{file}")[0]:
            parts.setdefault(tensor.fqn, []).append(tensor)
    return _build_state([_merge_parts(group, folder) for group in parts.values()], {})


def _merge_parts(parts: Sequence[ForeignTensor], folder: str) -> ForeignTensor:
    first = parts[0]
    move = "the files are of several saves: move those of the others away"
    if any((p.dtype, len(p.shape)) != (first.dtype, len(first.shape)) for p in parts):
        raise IncompatibleError(
            f"{folder}: files have parts of {first.fqn} with other dtypes or dimensions: {move}"
        )
    shape = tuple(map(max, zip(*(part.shape for part in parts), strict=True)))
    if 0 in shape:
        chunk = replace(first.chunks[0], cell=Region.whole(shape))
        return ForeignTensor(first.fqn, first.dtype, shape, (chunk,))
    chunks = [part.chunks[0] for part in parts if part.chunks[0].cell.numel]
    numel = sum(chunk.cell.numel for chunk in chunks)
    if numel < prod(shape):
        raise NotFoundError(
            f"{folder}: its files have only {numel} of the {prod(shape)} elements of {first.fqn}: "
            f"copy the files of the other ranks there"
        )
    try:
        check_tiling([chunk.cell for chunk in chunks if isinstance(chunk.cell, Region)], shape)
    except ValueError as error:
        files = listed([chunk.file.rpartition("/")[2] for chunk in chunks])
        raise IncompatibleError(f"{folder}: {first.fqn} in {files}: {error}: {move}") from None
    return ForeignTensor(first.fqn, first.dtype, shape, tuple(chunks))


def _parse_offsets(metadata: dict[str, Json], path: str) -> _FindOffset:
    """Take what DCP wrote about parts of tensors; return the offset of a tensor by its name."""
    text = metadata.pop(_SHARDING_INFO, None)
    if text is None:
        return lambda _, shape: (0,) * len(shape)
    label = f"{path}, {_SHARDING_INFO}"
    if not isinstance(text, str):
        raise CorruptError(f"{label}: {strict_json.quote(text)} is not text; fetch the file again")
    info = expect_object(strict_json.parse(text.encode(), label), label)

    def find_offset(name: str, shape: Shape) -> Shape:
        entry = expect_object(info.get(name), f"{label}, {strict_json.quote(name)}")
        offset = tuple(_parse_sizes(entry.get("saved_offsets"), f"{label}, saved_offsets"))
        if len(offset) != len(shape):
            raise CorruptError(
                f"{label}: {strict_json.quote(name)} has {len(shape)} dimensions, but an offset of "
                f"{len(offset)}; fetch the file again"
            )
        return offset

    return find_offset


def _build_state(tensors: Sequence[ForeignTensor], metadata: Mapping[str, Json]) -> ForeignState:
    named = [replace(tensor, fqn=f"{MODEL}.{tensor.fqn}") for tensor in tensors]
    names = tuple(tensor.fqn for tensor in tensors)
    tree = (Node("", "dict", (MODEL,)), Node(MODEL, "dict", names))
    return ForeignState(named, tree, {}, dict(metadata))


def _read_header(storage: Storage, path: str) -> tuple[list[ForeignTensor], dict[str, Json]]:
    """Return the tensors of a file, and its metadata."""
    with closing(open_foreign_file(storage, path)) as file:
        size = memoryview(bytearray(8))
        count = file.read_into(0, size)
        nbytes = int.from_bytes(size, "little")
        if count < 8 or not 2 <= nbytes <= min(MAX_HEADER_NBYTES, file.nbytes - 8):
            raise CorruptError(f"{path}: not a safetensors file: it has no complete header")
        header = bytearray(nbytes)
        if file.read_into(8, memoryview(header)) < nbytes:
            raise CorruptError(f"{path} was truncated while it was read")
        total = file.nbytes
    doc = expect_object(strict_json.parse(bytes(header).rstrip(b" "), path), path)
    metadata = expect_object(doc.pop("__metadata__", {}), f"{path}, __metadata__")
    if "dist_ckpt_index" in metadata:
        raise IncompatibleError(
            f"{path} has the bytes of a state: read them with dist_ckpt.load_bytes(state, data)"
        )
    if "dist_ckpt" in metadata:
        raise IncompatibleError(
            f"{path} is one file of a dist_ckpt checkpoint: give the checkpoint's folder"
        )
    find_offset = _parse_offsets(metadata, path)
    tensors = [_parse_tensor(name, doc[name], path, 8 + nbytes, total, find_offset) for name in doc]
    _check_offsets(tensors, path, 8 + nbytes, total)
    return tensors, metadata


def _check_offsets(tensors: Sequence[ForeignTensor], path: str, start: int, total: int) -> None:
    """Raise CorruptError unless every byte after the header belongs to exactly one tensor.

    The safetensors library refuses the same files. They have no checksums, so this detects some
    damage: a file that is too long, or a header of another file.
    """
    spans = sorted(
        (t.chunks[0].start, t.chunks[0].cell.numel * DTYPES[t.dtype].itemsize, t.fqn)
        for t in tensors
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


def _parse_tensor(
    name: str, value: Json, path: str, start: int, total: int, find_offset: _FindOffset
) -> ForeignTensor:
    label = f"{path}, {strict_json.quote(name)}"
    entry = expect_object(value, label)
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
    region = Region(find_offset(name, sizes), sizes)
    chunk = ForeignChunk(region, path, start + first)
    return ForeignTensor(name, dtype.name, region.stop, (chunk,))


def _parse_sizes(value: Json, label: str) -> Iterator[int]:
    if not isinstance(value, list):
        raise CorruptError(f"{label}: {strict_json.quote(value)} is not a list of numbers")
    for number in value:
        if type(number) is not int or not 0 <= number < 1 << 63:
            raise CorruptError(f"{label}: {strict_json.quote(number)} is not a size")
        yield number
