"""Shard files: the safetensors header, with what safetensors cannot say in its `__metadata__`.

A file is a u64 length, a JSON header padded with spaces up to a multiple of 4096, and the shards'
bytes without holes. `docs/format.md` has the fields. The names of the tensors are for people and
for other tools; our reader takes fqn, region and true dtype from `__metadata__` only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import count

from dist_ckpt import strict_json
from dist_ckpt.digest import BLOCK_DIGEST_CHARS, num_blocks
from dist_ckpt.dtypes import DTYPES
from dist_ckpt.errors import IncompatibleError
from dist_ckpt.index import MAX_STEP, Json
from dist_ckpt.json_fields import (
    VERSION,
    check_version,
    decode_dtype,
    decode_region,
    decode_shape,
    integers,
)
from dist_ckpt.layout import check_cell
from dist_ckpt.region import Cell, Elements, Region, Shape, Span
from dist_ckpt.strict_json import corrupt

ALIGNMENT = 4096

# What the safetensors library refuses to open.
MAX_HEADER_NBYTES = 100_000_000
MAX_NAME_NBYTES = 1024
MAX_RANK = 999_999_999

_HEX = re.compile(r"[0-9a-f]*")


@dataclass(frozen=True, slots=True)
class StoredShard:
    """One shard in a file: `name` is its key there, `span` its bytes after the header.

    `digests` has one digest for each block of it; empty before the shard is written.
    """

    name: str
    fqn: str
    dtype: str
    shape: Shape
    cell: Cell
    span: Span
    digests: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ShardFile:
    """What the header of one shard file says. `header_nbytes` is where the shards begin."""

    component: str
    rank: int
    world_size: int
    step: int | None
    block_nbytes: int
    header_nbytes: int
    shards: tuple[StoredShard, ...]

    @property
    def nbytes(self) -> int:
        """The size of the whole file."""
        return self.header_nbytes + (self.shards[-1].span.stop if self.shards else 0)


def arrange(cells: Iterable[tuple[str, str, Shape, Cell]]) -> tuple[StoredShard, ...]:
    """Put cells, given as (fqn, dtype, shape of the tensor, cell), in order and give them names.

    Largest item size first, so that every shard is aligned to its own, then fqn, then cell.
    """
    ordered = sorted(cells, key=lambda c: (-DTYPES[c[1]].itemsize, c[0], c[3]))
    names = _names([(fqn, shape, cell) for fqn, _, shape, cell in ordered])
    shards, start = [], 0
    for name, (fqn, dtype, shape, cell) in zip(names, ordered, strict=True):
        stop = start + cell.numel * DTYPES[dtype].itemsize
        shards.append(StoredShard(name, fqn, dtype, shape, cell, Span(start, stop)))
        start = stop
    return tuple(shards)


def header_nbytes(file: ShardFile) -> int:
    """Return the room for a file's header, whatever its step and digests will be."""
    longest = _header_json(replace(file, step=MAX_STEP), "0" * _digest_chars(file))
    return -(-(8 + len(longest)) // ALIGNMENT) * ALIGNMENT


def encode_header(file: ShardFile) -> bytes:
    """Return the first `file.header_nbytes` bytes of a file; its digests must be complete."""
    digests = "".join(digest for shard in file.shards for digest in shard.digests)
    assert len(digests) == _digest_chars(file), "a digest for every block of every shard"
    encoded = _header_json(file, digests)
    room = file.header_nbytes - 8
    assert file.header_nbytes % ALIGNMENT == 0, "the shards begin aligned"
    assert len(encoded) <= room, f"a header of {len(encoded)} bytes in a room of {room}"
    if room > MAX_HEADER_NBYTES:
        raise ValueError(
            f"{len(file.shards)} shards of {file.component!r} on rank {file.rank} need a header of "
            f"{room} bytes, more than safetensors reads; split the state over components"
        )
    return room.to_bytes(8, "little") + encoded.ljust(room, b" ")


def decode_header_nbytes(data: bytes, *, nbytes: int, what: str = "shard file") -> int:
    """Return where the shards begin, from the first 8 bytes of a file that has `nbytes`."""
    if len(data) < 8:
        raise corrupt(what, f"{len(data)} bytes are no safetensors file")
    header = 8 + int.from_bytes(data[:8], "little")
    if data.startswith(b"version https://git-lfs"):
        raise corrupt(what, "it is a Git LFS pointer, not the file itself")
    if header > min(nbytes, 8 + MAX_HEADER_NBYTES):
        raise corrupt(what, f"header length {header - 8} in a file of {nbytes} bytes")
    if header % ALIGNMENT:
        raise corrupt(what, f"it begins with a header of {header} bytes, not a multiple of 4096")
    return header


def decode_header(data: bytes, *, nbytes: int, what: str = "shard file") -> ShardFile:
    """Return what a header says: all of `data`, from a file of `nbytes` bytes.

    CorruptError, or IncompatibleError if the file is from a newer version; `what` names the file
    in them. On return the shards fill the file without a hole and agree with safetensors' view.
    """
    if decode_header_nbytes(data[:8], nbytes=nbytes, what=what) != len(data):
        raise corrupt(what, f"its header does not end at byte {len(data)}")
    text = data[8:].rstrip(b" ")
    if not text.startswith(b"{") or not text.endswith(b"}"):
        raise corrupt(what, "its header is not one JSON object padded with spaces")
    entries = strict_json.mapping(strict_json.parse(text, what), what)
    metadata = strict_json.mapping(entries.pop("__metadata__", {}), f"{what}, __metadata__")
    if "dist_ckpt" not in metadata:
        raise IncompatibleError(
            f"{what}: a safetensors file that dist_ckpt did not write; open it with safetensors"
        )
    ours = strict_json.string(metadata["dist_ckpt"], f"{what}, dist_ckpt")
    facts = strict_json.parse(ours.encode("utf-8"), f"{what}, dist_ckpt")
    check_version(facts, f"{what}, dist_ckpt")
    _, digests = strict_json.fields(metadata, ("dist_ckpt", "digests"), f"{what}, __metadata__")
    hexes = _hexes(strict_json.string(digests, what), what)
    file = _facts(facts, len(data), hexes, f"{what}, dist_ckpt")
    if file.nbytes != nbytes:
        raise corrupt(what, f"{nbytes} bytes; its header says {file.nbytes}")
    _check_entries(file.shards, entries, what)
    return file


def stored_shape(shard: StoredShard) -> Shape:
    """Return the shape under which safetensors sees a shard."""
    shape = (shard.cell.numel,) if isinstance(shard.cell, Elements) else shard.cell.shape
    dtype = DTYPES[shard.dtype]
    return shape if dtype.safetensors else (*shape, dtype.itemsize)


# --- encoding --------------------------------------------------------------------------------


def _digest_chars(file: ShardFile) -> int:
    blocks = sum(num_blocks(shard.span.nbytes, file.block_nbytes) for shard in file.shards)
    return blocks * BLOCK_DIGEST_CHARS


def _header_json(file: ShardFile, digests: str) -> bytes:
    facts: Json = {
        "format": {"version": VERSION, "requires": []},
        "component": file.component,
        "rank": file.rank,
        "world_size": file.world_size,
        "step": file.step,
        "block_nbytes": file.block_nbytes,
        "shards": [
            [shard.name, shard.fqn, shard.dtype, list(shard.shape), _encode_cell(shard.cell)]
            for shard in file.shards
        ],
    }
    metadata: Json = {"dist_ckpt": strict_json.dump(facts).decode(), "digests": digests}
    entries: dict[str, Json] = {"__metadata__": metadata}
    for shard in file.shards:
        entries[shard.name] = {
            "dtype": DTYPES[shard.dtype].safetensors or "U8",
            "shape": list(stored_shape(shard)),
            "data_offsets": [shard.span.start, shard.span.stop],
        }
    return strict_json.dump(entries)


def _encode_cell(cell: Cell) -> Json:
    if isinstance(cell, Elements):
        return {"flat": [cell.start, cell.stop]}
    return [list(cell.offset), list(cell.shape)]


def _names(cells: Sequence[tuple[str, Shape, Cell]]) -> list[str]:
    natural = [_natural_name(fqn, shape, cell) for fqn, shape, cell in cells]
    taken = {name for name in natural if name is not None}
    names = []
    for number, name in enumerate(natural):
        if name is None:
            # In steps that no other shard of the file takes.
            tries = (f"t{n}" for n in count(number, len(cells)))
            name = next(name for name in tries if name not in taken)  # noqa: PLW2901
        names.append(name)
    return names


def _natural_name(fqn: str, shape: Shape, cell: Cell) -> str | None:
    """Return what people want to read, or None where it could be mistaken for another's."""
    if fqn == "__metadata__" or fqn.endswith("]"):
        return None
    name = fqn if cell == Region.whole(shape) else f"{fqn}[{cell}]"
    return name if len(name.encode("utf-8")) <= MAX_NAME_NBYTES else None


# --- decoding --------------------------------------------------------------------------------


def _hexes(digests: str, what: str) -> list[str]:
    if len(digests) % BLOCK_DIGEST_CHARS or not _HEX.fullmatch(digests):
        raise corrupt(what, f"{len(digests)} characters of digests, not all of them hex")
    starts = range(0, len(digests), BLOCK_DIGEST_CHARS)
    return [digests[i : i + BLOCK_DIGEST_CHARS] for i in starts]


def _facts(facts: Json, header: int, digests: list[str], what: str) -> ShardFile:
    names = ("format", "component", "rank", "world_size", "step", "block_nbytes", "shards")
    _, component, rank, world_size, step, block_nbytes, rows = strict_json.fields(
        facts, names, what
    )
    world_size = strict_json.integer(world_size, 1, MAX_RANK + 1, f"{what}, world_size")
    block_nbytes = strict_json.integer(block_nbytes, 1, 1 << 40, f"{what}, block_nbytes")
    return ShardFile(
        component=strict_json.string(component, f"{what}, component"),
        rank=strict_json.integer(rank, 0, world_size - 1, f"{what}, rank"),
        world_size=world_size,
        step=None if step is None else strict_json.integer(step, 0, MAX_STEP, f"{what}, step"),
        block_nbytes=block_nbytes,
        header_nbytes=header,
        shards=_shards(strict_json.array(rows, f"{what}, shards"), block_nbytes, digests, what),
    )


def _shards(
    rows: list[Json], block_nbytes: int, digests: list[str], what: str
) -> tuple[StoredShard, ...]:
    shards, start, used = [], 0, 0
    for number, row in enumerate(rows):
        here = f"{what}, shard {number}"
        name, fqn, dtype, shape, region = strict_json.row(row, 5, here)
        kind = decode_dtype(dtype, here)
        sizes = decode_shape(shape, kind, here)
        cell = _decode_cell(region, sizes, here)
        span = Span(start, start + cell.numel * kind.itemsize)
        ours = tuple(digests[used : used + num_blocks(span.nbytes, block_nbytes)])
        start, used = span.stop, used + num_blocks(span.nbytes, block_nbytes)
        name, fqn = strict_json.string(name, here), strict_json.string(fqn, here)
        shards.append(StoredShard(name, fqn, kind.name, sizes, cell, span, ours))
    if used != len(digests):
        raise corrupt(what, f"{len(digests)} digests, but its shards have {used} blocks")
    return tuple(shards)


def _decode_cell(value: Json, shape: Shape, what: str) -> Cell:
    cell: Cell
    try:
        if type(value) is dict:
            (flat,) = strict_json.fields(value, ("flat",), what)
            bounds = strict_json.row(flat, 2, what)
            cell = Elements(*integers(bounds, what))
        else:
            cell = decode_region(value, what)
        check_cell(cell, shape)
    except ValueError as error:
        raise corrupt(what, str(error)) from None
    return cell


def _check_entries(shards: Sequence[StoredShard], entries: dict[str, Json], what: str) -> None:
    """Check that safetensors' own entries say the same as our table."""
    if len(entries) != len(shards) or len({shard.name for shard in shards}) != len(shards):
        raise corrupt(what, f"{len(entries)} tensors in the header, {len(shards)} in dist_ckpt")
    for shard in shards:
        here = f"{what}, {shard.name!r}"
        entry = strict_json.fields(
            entries.get(shard.name), ("dtype", "shape", "data_offsets"), here
        )
        dtype, shape, offsets = entry
        if (
            dtype != (DTYPES[shard.dtype].safetensors or "U8")
            or integers(shape, here) != stored_shape(shard)
            or integers(offsets, here) != (shard.span.start, shard.span.stop)
        ):
            raise corrupt(here, f"{strict_json.shown(entry)} is not what dist_ckpt says")
