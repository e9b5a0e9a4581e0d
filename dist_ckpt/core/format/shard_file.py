"""Shard files: safetensors files whose `__metadata__` has all that safetensors cannot express.

First comes the length of the header (u64), then a JSON header, padded with spaces to a multiple of
4096, then the shards without holes. `docs/format.md` has the fields. Tensor names are for people
and other tools: our reader takes fqn, region and real dtype from `__metadata__`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, count, pairwise
from json import JSONEncoder
from typing import overload

from msgspec import Raw, json

from dist_ckpt.core.format import strict_json
from dist_ckpt.core.format.checksums import BLOCK_DIGEST_CHARS, num_blocks
from dist_ckpt.core.format.dtypes import DTYPES
from dist_ckpt.core.format.geometry import ByteRange, Cell, ElementRange, Region, Shape, check_cell
from dist_ckpt.core.format.index.index import MAX_STEP
from dist_ckpt.core.format.strict_json import Json, corrupt_error
from dist_ckpt.core.runtime.processes import paused_collector
from dist_ckpt.errors import CheckpointError, IncompatibleError


@dataclass(frozen=True, slots=True)
class StoredShard:
    """One shard in a file."""

    name: str  # its key in the header
    fqn: str
    dtype: str
    shape: Shape  # of the whole tensor
    cell: Cell
    span: ByteRange  # its bytes, counted from the end of the header
    digests: tuple[str, ...] = ()  # of its blocks; empty before it is written


@dataclass(frozen=True, slots=True)
class ShardKind:
    """The common part of shards with equal dtype, shape and cell: most files have few kinds."""

    dtype: str
    shape: Shape
    cell: Cell
    nbytes: int
    num_blocks: int
    entry: str  # JSON for safetensors, without the offsets and the last brace


class DecodedShards(Sequence[StoredShard]):
    """The shards of a decoded header, in order. Each is built on access.

    Building all of them takes longer than decoding the header, and a read of a slice needs one.
    """

    def __init__(
        self, names: Sequence[str], fqns: Sequence[str], kinds: Sequence[ShardKind], digests: str
    ) -> None:
        """Take name, fqn and kind of each shard, and the digests of all blocks as one string."""
        self._names = names
        self._fqns = fqns
        self._kinds = kinds
        self._digests = digests
        # The start of each shard, and the end of the last.
        self.starts: Sequence[int] = list(accumulate((kind.nbytes for kind in kinds), initial=0))
        self._blocks = list(accumulate((kind.num_blocks for kind in kinds), initial=0))

    @property
    def num_blocks(self) -> int:
        """The number of blocks of all shards."""
        return self._blocks[-1]

    def block_starts(self, block_nbytes: int) -> list[int]:
        """Return the start of each block in the data section, and the end of the last."""
        starts: list[int] = []
        for start, stop in pairwise(self.starts):
            starts += range(start, stop, block_nbytes)
        return [*starts, self.starts[-1]]

    def dtype_and_shape(self, fqn: str, cell: Cell) -> tuple[str, Shape] | None:
        """Return the dtype and the tensor's shape of the shard with this cell, or None."""
        number = self.find_number(fqn, cell)
        return None if number is None else (self._kinds[number].dtype, self._kinds[number].shape)

    def first_digests(self, number: int, count: int) -> str:
        """Return the digests of `count` successive blocks, from the first block of a shard."""
        start = self._blocks[number] * BLOCK_DIGEST_CHARS
        return self._digests[start : start + count * BLOCK_DIGEST_CHARS]

    def find_number(self, fqn: str, cell: Cell) -> int | None:
        """Return the number of the shard with this cell of a tensor, or None."""
        first, following = self._chains
        number = first.get(fqn)
        while number is not None and self._kinds[number].cell != cell:
            number = following.get(number)
        return number

    @cached_property
    def _chains(self) -> tuple[Mapping[str, int], Mapping[int, int]]:
        """The number of each tensor's first shard; and after each shard, its tensor's next one.

        A list for each tensor, most with one shard, would cost the garbage collector more than
        this.
        """
        backwards = range(len(self) - 1, -1, -1)
        first = dict(zip(reversed(self._fqns), backwards, strict=True))
        following: dict[int, int] = {}
        if len(first) < len(self):
            later: dict[str, int] = {}
            for number in backwards:
                fqn = self._fqns[number]
                if fqn in later:
                    following[number] = later[fqn]
                later[fqn] = number
        return first, following

    def _build_shard(self, number: int) -> StoredShard:
        kind, start = self._kinds[number], self.starts[number]
        digits, chars = self.first_digests(number, kind.num_blocks), BLOCK_DIGEST_CHARS
        digests = tuple([digits[at : at + chars] for at in range(0, len(digits), chars)])
        span = ByteRange(start, start + kind.nbytes)
        name, fqn = self._names[number], self._fqns[number]
        return StoredShard(name, fqn, kind.dtype, kind.shape, kind.cell, span, digests)

    def entries(self) -> bytes | None:
        """Return the end of the header, after the metadata, as `HeaderText` writes it.

        None if two shards have one name, or if a shard has the name of the metadata.
        """
        if len({*self._names, "__metadata__"}) <= len(self):
            return None
        # Encode all names in one call: JSON strings contain no line breaks.
        lines = JSONEncoder(ensure_ascii=False, separators=("\n", ":"))
        names = lines.encode(self._names)[1:-1].split("\n")
        entries = [
            f',{name}:{kind.entry},"data_offsets":[{start},{start + kind.nbytes}]}}'
            for name, kind, start in zip(names, self._kinds, self.starts, strict=False)
        ]
        return "".join((*entries, "}")).encode("utf-8")

    @overload
    def __getitem__(self, number: int) -> StoredShard: ...
    @overload
    def __getitem__(self, number: slice) -> tuple[StoredShard, ...]: ...
    def __getitem__(self, number: int | slice) -> StoredShard | tuple[StoredShard, ...]:
        numbers = range(len(self))[number]
        return (
            self._build_shard(numbers)
            if isinstance(numbers, int)
            else tuple(map(self._build_shard, numbers))
        )

    def __len__(self) -> int:
        return len(self._names)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))


def safetensors_entry(dtype: str, cell: Cell) -> dict[str, Json]:
    """Return a shard's safetensors entry without its offsets."""
    record = DTYPES[dtype]
    shape = (cell.numel,) if isinstance(cell, ElementRange) else cell.shape
    stored = shape if record.safetensors else (*shape, record.itemsize)
    return {"dtype": record.safetensors or "U8", "shape": [*stored]}


ALIGNMENT = 4096

# The safetensors library refuses larger headers.
MAX_HEADER_NBYTES = 100_000_000
# A header has at least this many bytes for a tensor with elements, besides its name.
MIN_TENSOR_NBYTES = 90
MAX_NAME_NBYTES = 1024
MAX_RANK = 999_999_999

# The remedy for a state of too many tensors.
FEWER_TENSORS_REMEDY = (
    "stack small tensors into larger ones, or distribute them over more keys at the top of the "
    "state, each of which has its own file"
)

_HEX = re.compile(r"[0-9a-f]*")

# transformers opens no file without it.
_FORMAT = "pt"

# The text around our part of the metadata, as `HeaderText` writes it. Quotes in it are escaped.
_OWN_START = b'{"__metadata__":'
_OWN_DIGESTS = b',"digests":"'

# Our part of the metadata.
_FACTS = ("format", "component", "rank", "world_size", "step", "block_nbytes", "shards")
_ROWS = list[tuple[str, str, Raw, Raw, Raw]]


@dataclass(frozen=True, slots=True)
class ShardFile:
    """The decoded header of one shard file."""

    component: str
    rank: int
    world_size: int
    step: int | None  # of the save that wrote the file; later checkpoints may share it
    block_nbytes: int
    header_nbytes: int  # the shards begin here
    shards: DecodedShards

    @property
    def nbytes(self) -> int:
        """The size of the whole file."""
        return self.header_nbytes + (self.shards[-1].span.stop if self.shards else 0)


def arrange_shards(cells: Iterable[tuple[str, str, Shape, Cell]]) -> tuple[StoredShard, ...]:
    """Order and name cells, given as (fqn, dtype, shape of the tensor, cell).

    The largest item size is first, so that every shard is aligned; then come fqn and cell.
    """
    ordered = sorted(cells, key=lambda c: (-DTYPES[c[1]].itemsize, c[0], c[3]))
    names = _choose_names([(fqn, shape, cell) for fqn, _, shape, cell in ordered])
    shards, start = [], 0
    for name, (fqn, dtype, shape, cell) in zip(names, ordered, strict=True):
        stop = start + cell.numel * DTYPES[dtype].itemsize
        shards.append(StoredShard(name, fqn, dtype, shape, cell, ByteRange(start, stop)))
        start = stop
    return tuple(shards)


@dataclass(frozen=True, slots=True)
class HeaderText:
    """A header without step and digests, which are known only when the file is written."""

    before_step: bytes
    before_digests: bytes
    rest: bytes
    num_digests: int
    nbytes: int  # with any step and the digests

    def fill(self, step: int | None, digests: str) -> bytes:
        """Return the first `nbytes` bytes of the file. Every block has a digest."""
        assert len(digests) == self.num_digests * BLOCK_DIGEST_CHARS, "a digest for every block"
        number = b"null" if step is None else b"%d" % step
        parts = (self.before_step, number, self.before_digests, digests.encode("ascii"), self.rest)
        text = b"".join(parts)
        room = self.nbytes - 8
        assert self.nbytes % ALIGNMENT == 0, "the shards begin aligned"
        assert len(text) <= room, f"a header of {len(text)} bytes in a room of {room}"
        return room.to_bytes(8, "little") + text.ljust(room, b" ")


def header_text(
    shards: Sequence[StoredShard], *, component: str, rank: int, world_size: int, block_nbytes: int
) -> HeaderText:
    """Return the header of a file with these shards, without step and digests.

    Raises ValueError if it is longer than safetensors reads, or too long to be parsed.
    """
    facts: dict[str, Json] = {
        "format": strict_json.FORMAT,
        "component": component,
        "rank": rank,
        "world_size": world_size,
        "step": None,
        "block_nbytes": block_nbytes,
    }
    try:
        text = _header_json(facts, shards)
    except ValueError as error:
        raise ValueError(
            f"{len(shards)} tensors of {component!r} on rank {rank} need a header that is too "
            f"large ({error}): {FEWER_TENSORS_REMEDY}"
        ) from None
    # Quotes inside strings are escaped, so neither pattern can be part of a name.
    step = text.index(rb"\"step\":null,") + len(rb"\"step\":")
    digests = text.index(b'"digests":"', step) + len(b'"digests":"')
    num_digests = sum(num_blocks(shard.span.nbytes, block_nbytes) for shard in shards)
    before, between, rest = text[:step], text[step + len(b"null") : digests], text[digests:]
    # 8 bytes of length, and the longest step.
    nbytes = 8 + len(before) + len(str(MAX_STEP)) + len(between) + len(rest)
    nbytes += num_digests * BLOCK_DIGEST_CHARS
    nbytes = -(-nbytes // ALIGNMENT) * ALIGNMENT
    if nbytes - 8 > MAX_HEADER_NBYTES:
        raise ValueError(
            f"{len(shards)} tensors of {component!r} on rank {rank} need a header of {nbytes - 8} "
            f"bytes, and the limit is {MAX_HEADER_NBYTES}: {FEWER_TENSORS_REMEDY}"
        )
    return HeaderText(
        before_step=before,
        before_digests=between,
        rest=rest,
        num_digests=num_digests,
        nbytes=nbytes,
    )


@paused_collector()
def decode_header(data: bytes, *, nbytes: int, label: str = "shard file") -> ShardFile:
    """Decode a header: all of `data`, from a file of `nbytes` bytes.

    `label` names the file in errors. Raises CorruptError, or IncompatibleError for a newer version.
    On return the shards fill the file without holes, and agree with the safetensors entries.
    """
    if len(data) < 8:
        raise corrupt_error(label, f"{len(data)} bytes are not a safetensors file")
    header_nbytes = 8 + int.from_bytes(data[:8], "little")
    if data.startswith(b"version https://git-lfs"):
        raise corrupt_error(label, "it is a Git LFS pointer, not the file itself")
    if header_nbytes > min(nbytes, 8 + MAX_HEADER_NBYTES):
        raise corrupt_error(label, f"header length {header_nbytes - 8} in a file of {nbytes} bytes")
    if header_nbytes % ALIGNMENT:
        fact = f"it begins with a header of {header_nbytes} bytes, not a multiple of 4096"
        raise corrupt_error(label, fact)
    if header_nbytes != len(data):
        raise corrupt_error(label, f"its header does not end at byte {len(data)}")
    text = data[8:].rstrip(b" ")
    if not text.startswith(b"{") or not text.endswith(b"}"):
        raise corrupt_error(label, "its header is not one JSON object padded with spaces")
    file = _decode_as_written(text, len(data), label) or _decode_any(text, len(data), label)
    if file.nbytes != nbytes:
        raise corrupt_error(label, f"{nbytes} bytes; its header says {file.nbytes}")
    return file


# --- encoding --------------------------------------------------------------------------------


def _header_json(facts: Mapping[str, Json], shards: Sequence[StoredShard]) -> bytes:
    rows: list[Json] = [
        [shard.name, shard.fqn, shard.dtype, list(shard.shape), _encode_cell(shard.cell)]
        for shard in shards
    ]
    ours = strict_json.dump({**facts, "shards": rows}).decode()
    metadata: dict[str, Json] = {"format": _FORMAT, "dist_ckpt": ours, "digests": ""}
    entries: dict[str, Json] = {"__metadata__": metadata}
    for shard in shards:
        entries[shard.name] = {
            **safetensors_entry(shard.dtype, shard.cell),
            "data_offsets": [shard.span.start, shard.span.stop],
        }
    return strict_json.dump(entries)


def _encode_cell(cell: Cell) -> Json:
    if isinstance(cell, ElementRange):
        return {"flat": [cell.start, cell.stop]}
    return [list(cell.offset), list(cell.shape)]


def _choose_names(cells: Sequence[tuple[str, Shape, Cell]]) -> list[str]:
    natural = [_natural_name(fqn, shape, cell) for fqn, shape, cell in cells]
    used = set(natural)
    names = []
    for number, name in enumerate(natural):
        # Count in steps that no other shard of the file uses.
        tries = (f"t{n}" for n in count(number, len(cells)))
        names.append(next(free for free in tries if free not in used) if name is None else name)
    return names


def _natural_name(fqn: str, shape: Shape, cell: Cell) -> str | None:
    """Return the name for people, or None if another shard could have it."""
    if fqn == "__metadata__" or fqn.endswith("]"):
        return None
    name = fqn if cell == Region.whole(shape) else f"{fqn}[{cell}]"
    return name if len(name.encode("utf-8")) <= MAX_NAME_NBYTES else None


# --- decoding --------------------------------------------------------------------------------


def _decode_as_written(text: bytes, header: int, label: str) -> ShardFile | None:
    """Decode a header as `HeaderText` writes it; return None for any other.

    The safetensors entries, most of the header, are encoded again and compared, not parsed.
    """
    start = len(_OWN_START)
    end = text.find(b'"}', text.find(_OWN_DIGESTS) + len(_OWN_DIGESTS)) + 2
    if not text.startswith(_OWN_START) or end < start:
        return None
    try:
        file = _decode_metadata(strict_json.parse(text[start:end], label), header, label)
    except CheckpointError:
        return None  # `_decode_any` reports the error
    return file if file.shards.entries() == text[end:] else None


def _decode_any(text: bytes, header: int, label: str) -> ShardFile:
    """Decode a header with any JSON formatting."""
    entries = strict_json.mapping(strict_json.parse(text, label), label)
    file = _decode_metadata(entries.pop("__metadata__", {}), header, label)
    _check_entries(file.shards, entries, label)
    return file


def _decode_metadata(value: Json, header: int, label: str) -> ShardFile:
    here = f"{label}, __metadata__"
    metadata = strict_json.mapping(value, here)
    if "dist_ckpt" not in metadata:
        raise IncompatibleError(
            f"{label}: a safetensors file that dist_ckpt did not write; open it with safetensors"
        )
    ours_label = f"{label}, dist_ckpt"
    ours = strict_json.string(metadata["dist_ckpt"], ours_label)
    facts, rows = strict_json.parse_apart(ours.encode("utf-8"), "shards", ours_label)
    strict_json.check_version(facts, ours_label)
    # Before 2026-12 there was no `format`.
    names = ("format", "dist_ckpt", "digests")
    tools, _, digests = strict_json.fields({"format": _FORMAT, **metadata}, names, here)
    if tools != _FORMAT:
        raise corrupt_error(here, f"format {strict_json.quote(tools)} is not 'pt'")
    hexes = strict_json.string(digests, label)
    if len(hexes) % BLOCK_DIGEST_CHARS or not _HEX.fullmatch(hexes):
        raise corrupt_error(label, f"{len(hexes)} characters of digests, not all of them hex")
    label = ours_label
    _, component, rank, world_size, step, block_nbytes, _ = strict_json.fields(facts, _FACTS, label)
    world_size = strict_json.integer(world_size, 1, MAX_RANK + 1, f"{label}, world_size")
    block_nbytes = strict_json.integer(block_nbytes, 1, 1 << 40, f"{label}, block_nbytes")
    return ShardFile(
        component=strict_json.string(component, f"{label}, component"),
        rank=strict_json.integer(rank, 0, world_size - 1, f"{label}, rank"),
        world_size=world_size,
        step=None if step is None else strict_json.integer(step, 0, MAX_STEP, f"{label}, step"),
        block_nbytes=block_nbytes,
        header_nbytes=header,
        shards=_decode_shards(rows, block_nbytes, hexes, label),
    )


def _decode_shards(text: bytes, block_nbytes: int, digests: str, label: str) -> DecodedShards:
    try:
        rows = json.decode(text, type=_ROWS)
    except (ValueError, RecursionError) as error:
        raise corrupt_error(f"{label}, shards", str(error)) from None
    kinds = [b",".join(row[2:]) for row in rows]  # dtype, shape and cell
    numbers = dict(zip(kinds, range(len(kinds)), strict=True))
    texts = {kind: b"[%s]" % kind for kind in numbers}
    facts = strict_json.parse_each(texts.values(), f"{label}, shards")
    by_kind = {
        kind: _decode_kind(facts[text], block_nbytes, f"{label}, shard {numbers[kind]}")
        for kind, text in texts.items()
    }
    names, fqns = [name for name, *_ in rows], [fqn for _, fqn, *_ in rows]
    shards = DecodedShards(names, fqns, list(map(by_kind.__getitem__, kinds)), digests)
    if shards.num_blocks * BLOCK_DIGEST_CHARS != len(digests):
        num_digests = len(digests) // BLOCK_DIGEST_CHARS
        fact = f"{num_digests} digests, but its shards have {shards.num_blocks} blocks"
        raise corrupt_error(label, fact)
    return shards


def _decode_kind(facts: Json, block_nbytes: int, label: str) -> ShardKind:
    code, sizes, region = strict_json.row(facts, 3, label)
    dtype = strict_json.decode_dtype(code, label)
    shape = strict_json.decode_shape(sizes, dtype, label)
    cell = _decode_cell(region, shape, label)
    nbytes = cell.numel * dtype.itemsize
    entry = strict_json.dump(safetensors_entry(dtype.name, cell)).decode("ascii").removesuffix("}")
    return ShardKind(dtype.name, shape, cell, nbytes, num_blocks(nbytes, block_nbytes), entry)


def _decode_cell(value: Json, shape: Shape, label: str) -> Cell:
    cell: Cell
    try:
        if type(value) is dict:
            (flat,) = strict_json.fields(value, ("flat",), label)
            bounds = strict_json.row(flat, 2, label)
            cell = ElementRange(*strict_json.integers(bounds, label))
        else:
            cell = strict_json.decode_region(value, label)
        check_cell(cell, shape)
    except ValueError as error:
        raise corrupt_error(label, str(error)) from None
    return cell


def _check_entries(shards: Sequence[StoredShard], entries: dict[str, Json], label: str) -> None:
    """Check that the safetensors entries agree with our table."""
    if len(entries) != len(shards) or len({shard.name for shard in shards}) != len(shards):
        fact = f"{len(entries)} tensors in the header, {len(shards)} in dist_ckpt"
        raise corrupt_error(label, fact)
    for shard in shards:
        here = f"{label}, {shard.name!r}"
        names = ("dtype", "shape", "data_offsets")
        entry = strict_json.fields(entries.get(shard.name), names, here)
        dtype, shape, offsets = entry
        stored = {"dtype": dtype, "shape": [*strict_json.integers(shape, here)]}
        is_same = stored == safetensors_entry(shard.dtype, shard.cell)
        span = shard.span.start, shard.span.stop
        if not is_same or strict_json.integers(offsets, here) != span:
            raise corrupt_error(here, f"{strict_json.quote(entry)} is not what dist_ckpt says")
