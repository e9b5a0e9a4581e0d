"""Plan a folder of safetensors files: the tensors of a checkpoint, and the files they go to."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from json import dumps
from math import prod

from dist_ckpt.core.format.dtypes import DTYPES
from dist_ckpt.core.format.geometry import Shape
from dist_ckpt.core.format.index.index import Catalog
from dist_ckpt.core.planning.name_selection import Selection, excluded_names
from dist_ckpt.core.state.tree.containers import RECORD
from dist_ckpt.errors import IncompatibleError, listed
from dist_ckpt.interop.hf.read import MAX_HEADER_NBYTES
from dist_ckpt.interop.registry import HF_FILE, SAFETENSORS

# Three windows are in memory at once, with the blocks that are read for them.
WINDOW_NBYTES = 16 << 20

# The metadata of each file. transformers requires "format"; an export replaces a file only if it
# has "exported_by".
EXPORT_METADATA = {"format": "pt", "exported_by": "dist_ckpt"}

DEFAULT_SHARD_SIZE = "5GB"

# The data begins on a page, as in shard files. So it can be cloned, and bypass the page cache.
_ALIGNMENT = 4096

_FLOATS = re.compile(r"(b?float16|float32|float64|float8_\w+)")
_SHORT_NAMES = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", re.IGNORECASE)
_UNIT_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


@dataclass(frozen=True, slots=True)
class ExportedTensor:
    """A tensor to write: `fqn` is the name of its stored data, whose dtype is `saved_dtype`."""

    name: str
    fqn: str
    saved_dtype: str
    dtype: str
    shape: Shape

    @property
    def nbytes(self) -> int:
        """The size that is written."""
        return prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True, slots=True)
class ExportedFile:
    """A file to write: its header, and the tensors after it, without gaps.

    `clone_of` is the number of the checkpoint's file that has the same data after its own header.
    """

    name: str
    header: bytes
    tensors: tuple[ExportedTensor, ...]
    clone_of: int | None = None

    @property
    def data_nbytes(self) -> int:
        """The size of all its tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def nbytes(self) -> int:
        """Its size."""
        return len(self.header) + self.data_nbytes


def parse_dtype(option: object) -> str | None:
    """Return the dtype that an option names, for floating tensors. ValueError if it is unknown."""
    if option is None:
        return None
    name = str(option).removeprefix("torch.")
    name = _SHORT_NAMES.get(name, name)
    if name not in _SHORT_NAMES.values():
        names = ", ".join((*_SHORT_NAMES.values(), *_SHORT_NAMES))
        raise ValueError(f"dtype={option!r}: give one of {names}")
    return name


def parse_size(size: int | str) -> int:
    """Return a size such as "5GB" or "500MiB" in bytes. ValueError for an invalid one."""
    if type(size) is int and size > 0:
        return size
    if isinstance(size, str) and (match := _SIZE.fullmatch(size.strip())):
        base = 1024 if match[3] else 1000
        if nbytes := int(float(match[1]) * base ** _UNIT_POWERS[match[2].upper()]):
            return nbytes
    raise ValueError(f"max_shard_size={size!r}: give a number of bytes, or one like 5GB or 500MiB")


def select_tensors(
    catalog: Catalog, path: str, only: str, selection: Selection, dtype: str | None
) -> tuple[ExportedTensor, ...]:
    """Return the tensors of a component to write, in its order. A tied tensor is written once.

    IncompatibleError names everything that safetensors cannot store, with remedies. ValueError for
    a pattern that matches nothing.
    """
    prefix = f"{only}."
    tables = (catalog.tensors, catalog.aliases, catalog.values, catalog.per_rank)
    below = [name for name in chain(*tables) if name.startswith(prefix) or name == only]
    if not any(name in catalog.tensors or name in catalog.aliases for name in below):
        names_of_tensors = chain(catalog.tensors, catalog.aliases)
        components = dict.fromkeys(n.partition(".")[0] for n in names_of_tensors if "." in n)
        raise IncompatibleError(
            f"{path} has no tensors in {only!r}: give a component that has some (only=, on the "
            f"command line --only): {listed([*components]) or 'none has'}"
        )
    if unmatched := selection.unmatched(chain(*tables)):
        raise ValueError(listed(unmatched, "; "))
    names = [name for name in below if name in selection]
    problems = [*_value_problems(catalog, names)]
    tensors: dict[str, ExportedTensor] = {}
    for name in names:
        data = catalog.aliases.get(name, name)
        if data not in catalog.tensors or data in tensors:
            continue
        record = catalog.tensors[data]
        new_dtype = dtype if dtype and _FLOATS.fullmatch(record.dtype) else record.dtype
        short = name.removeprefix(prefix)
        tensors[data] = ExportedTensor(short, data, record.dtype, new_dtype, record.shape)
        problems += _tensor_problems(name, tensors[data], only)
    if not problems and not tensors:
        raise ValueError(f"{selection} leaves no tensor of {only!r}: give other patterns")
    if problems:
        raise IncompatibleError(
            f"{path}: safetensors files cannot store all of {only!r}: {listed(problems, '; ')}"
        )
    return tuple(tensors.values())


def _value_problems(catalog: Catalog, names: Sequence[str]) -> Iterator[str]:
    # A tensor subclass has a record of its inner tensors, which is a value.
    subclasses = {n.removesuffix(f".{RECORD}") for n in names if n.endswith(f".{RECORD}")}
    for fqn in sorted(subclasses):
        yield (
            f"{fqn} is a quantized tensor, made of others: save it dequantized, or leave it out "
            f"({excluded_names(fqn)})"
        )
    for name in names:
        is_value = name in catalog.values or name in catalog.per_rank
        if is_value and not any(name.startswith(f"{fqn}.") for fqn in subclasses):
            yield (
                f"{name} is not a tensor: leave it out ({excluded_names(name)}), and store it "
                f"elsewhere"
            )


def _tensor_problems(fqn: str, tensor: ExportedTensor, only: str) -> Iterator[str]:
    leave_out = f"leave it out ({excluded_names(fqn)})"
    rename = f"rename it before the save, or {leave_out}"
    if fqn == only or not tensor.name:
        yield f"{fqn} has no name within {only!r}: {rename}"
    if tensor.name == "__metadata__":
        yield f"{fqn}: {tensor.name!r} is a reserved name in safetensors: {rename}"
    if DTYPES[tensor.dtype].safetensors is None:
        convert = "convert it (dtype=), or " if _FLOATS.fullmatch(tensor.dtype) else ""
        yield f"{fqn} is {tensor.dtype}, which safetensors lacks: {convert}{leave_out}"


def pack_files(
    tensors: Sequence[ExportedTensor],
    max_nbytes: int,
    cloned: Mapping[int, Sequence[ExportedTensor]],
) -> tuple[ExportedFile, ...]:
    """Distribute tensors, in their order, to files with at most `max_nbytes` of data.

    A larger tensor gets a separate file. `cloned` has the tensors of whole files of the checkpoint,
    by the number of the file. Each such file becomes one file of the export, whatever its size.
    """
    groups: list[tuple[int | None, Sequence[ExportedTensor]]] = [*cloned.items()]
    cloned_names = {entry.name for group in cloned.values() for entry in group}
    free, group = 0, list[ExportedTensor]()
    for tensor in tensors:
        if tensor.name in cloned_names:
            continue
        if not group or tensor.nbytes > free:
            group, free = [], max_nbytes
            groups.append((None, group))
        group.append(tensor)
        free -= tensor.nbytes
    count = len(groups)
    files = []
    for number, (clone_of, members) in enumerate(groups, 1):
        name = HF_FILE if count == 1 else f"model-{number:05}-of-{count:05}{SAFETENSORS}"
        # As in safetensors: the widest dtype first, so that each tensor is aligned to it.
        by_width = sorted(members, key=lambda t: (-DTYPES[t.dtype].itemsize, t.name))
        files.append(_plan_file(name, by_width if clone_of is None else members, clone_of))
    return tuple(files)


def _plan_file(name: str, tensors: Sequence[ExportedTensor], clone_of: int | None) -> ExportedFile:
    doc: dict[str, object] = {"__metadata__": EXPORT_METADATA}
    start = 0
    for tensor in tensors:
        stop = start + tensor.nbytes
        doc[tensor.name] = {
            "dtype": DTYPES[tensor.dtype].safetensors,
            "shape": [*tensor.shape],
            "data_offsets": [start, stop],
        }
        start = stop
    text = dumps(doc, ensure_ascii=False, separators=(",", ":")).encode()
    room = -(-(8 + len(text)) // _ALIGNMENT) * _ALIGNMENT - 8
    if room > MAX_HEADER_NBYTES:
        raise IncompatibleError(
            f"{name}: {len(tensors)} tensors need a header of {room} bytes, more than the limit "
            f"of safetensors: give a smaller max_shard_size"
        )
    header = room.to_bytes(8, "little") + text.ljust(room)
    return ExportedFile(name, header, tuple(tensors), clone_of)


def encode_index(files: Sequence[ExportedFile]) -> bytes:
    """Return the index of several files, as transformers writes it."""
    weight_map = {tensor.name: file.name for file in files for tensor in file.tensors}
    doc = {
        "metadata": {"total_size": sum(file.data_nbytes for file in files)},
        "weight_map": dict(sorted(weight_map.items())),
    }
    return (dumps(doc, indent=2, ensure_ascii=False) + "\n").encode()
