"""The table of the shards in a shard file: where each lies; values are made when asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from json import JSONEncoder
from typing import overload

from dist_ckpt.core.format.checksums import BLOCK_DIGEST_CHARS
from dist_ckpt.core.format.dtypes import DTYPES
from dist_ckpt.core.format.geometry import ByteRange, Cell, ElementRange, Shape
from dist_ckpt.core.format.strict_json import Json


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
    span: ByteRange
    digests: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ShardKind:
    """What shards of one dtype, shape and cell have in common; most shards are of few kinds.

    `entry` is what safetensors is told of them, but for the place: JSON without its last brace.
    """

    dtype: str
    shape: Shape
    cell: Cell
    nbytes: int
    num_blocks: int
    entry: str


class DecodedShards(Sequence[StoredShard]):
    """The shards of a decoded header, in order; each is made when it is asked for.

    To make all costs more than to decode the header, and who reads a slice needs one.
    """

    def __init__(
        self, names: Sequence[str], fqns: Sequence[str], kinds: Sequence[ShardKind], digests: str
    ) -> None:
        """`names`, `fqns` and `kinds` are of each shard; `digests` of all blocks, in a row."""
        self._names = names
        self._fqns = fqns
        self._kinds = kinds
        self._digests = digests
        # Where each begins, and last where the data ends.
        self.starts: Sequence[int] = list(accumulate((kind.nbytes for kind in kinds), initial=0))
        self._blocks = list(accumulate((kind.num_blocks for kind in kinds), initial=0))

    @property
    def num_blocks(self) -> int:
        """How many blocks all of them have."""
        return self._blocks[-1]

    def block_starts(self, block_nbytes: int) -> list[int]:
        """Return where each block begins in the data section, and last where that ends."""
        starts: list[int] = []
        for start, stop in pairwise(self.starts):
            starts += range(start, stop, block_nbytes)
        return [*starts, self.starts[-1]]

    def facts(self, fqn: str, cell: Cell) -> tuple[str, Shape] | None:
        """Return the dtype and the tensor's shape of the shard that is this cell of it, or None."""
        number = self.number(fqn, cell)
        return None if number is None else (self._kinds[number].dtype, self._kinds[number].shape)

    def first_digests(self, number: int, count: int) -> str:
        """Return the digests of `count` blocks in a row, from the first of a shard on."""
        start = self._blocks[number] * BLOCK_DIGEST_CHARS
        return self._digests[start : start + count * BLOCK_DIGEST_CHARS]

    def number(self, fqn: str, cell: Cell) -> int | None:
        """Return the number of the shard that is this cell of a tensor, or None."""
        first, following = self._chains
        number = first.get(fqn)
        while number is not None and self._kinds[number].cell != cell:
            number = following.get(number)
        return number

    @cached_property
    def _chains(self) -> tuple[Mapping[str, int], Mapping[int, int]]:
        """The number of each tensor's first shard, and after each shard that of the tensor's next.

        Most tensors have one shard here: a list for each is more work for the collector of garbage
        than all the rest of this.
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

    def _make(self, number: int) -> StoredShard:
        kind, start = self._kinds[number], self.starts[number]
        first, last = self._blocks[number], self._blocks[number + 1]
        chars = BLOCK_DIGEST_CHARS
        ours = self._digests[first * chars : last * chars]
        digests = tuple([ours[at : at + chars] for at in range(0, len(ours), chars)])
        span = ByteRange(start, start + kind.nbytes)
        name, fqn = self._names[number], self._fqns[number]
        return StoredShard(name, fqn, kind.dtype, kind.shape, kind.cell, span, digests)

    @property
    def can_be_entries(self) -> bool:
        """Say whether safetensors can tell them apart, and from the metadata."""
        names = set(self._names)
        return len(names) == len(self) and "__metadata__" not in names

    def entries(self) -> bytes:
        """Return the end of the header as `HeaderText` has it: all after the metadata."""
        # All names in one call: no JSON string holds a line break.
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
        return self._make(numbers) if isinstance(numbers, int) else tuple(map(self._make, numbers))

    def __len__(self) -> int:
        return len(self._names)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))


def entry_of(dtype: str, cell: Cell) -> dict[str, Json]:
    """Return what safetensors is told of a shard, but for its place."""
    known = DTYPES[dtype]
    shape = (cell.numel,) if isinstance(cell, ElementRange) else cell.shape
    stored = shape if known.safetensors else (*shape, known.itemsize)
    return {"dtype": known.safetensors or "U8", "shape": [*stored]}
