"""The index, as values: what a checkpoint is. `index_json.py` makes it the one JSON document.

A checkpoint exists if and only if its index exists. The same document, written by whoever gives
an attempt up, says "abandoned" instead; `docs/format.md` has the fields.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dist_ckpt.core.format import filenames
from dist_ckpt.core.format.geometry import Shape
from dist_ckpt.core.format.layout import Layout
from dist_ckpt.core.format.strict_json import Json
from dist_ckpt.core.runtime.typed_msgpack import Message

MAX_STEP = (1 << 63) - 1

# Of the files that are attached to a checkpoint: how many, and how large all together. Whoever
# saves has them in memory, and so has who reshards.
MAX_ATTACHED = 100
MAX_ATTACHED_NBYTES = 64 << 20

# Whose a per-rank value is: the rank, or what the user called it, e.g. ("dp", 3).
MAX_KEY_DEPTH = 8
if TYPE_CHECKING:
    Key = int | str | tuple["Key", ...]
else:  # where messages are decoded: so deep and no deeper
    Key = int | str
    for _ in range(MAX_KEY_DEPTH):
        Key = int | str | tuple[Key, ...]


@dataclass(frozen=True, slots=True)
class Component:
    """A top-level key of the state that holds tensors, or a part of one: what files of a stem hold.

    The parts of a key have its name, and are known by their stems.
    """

    name: str
    stem: str


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """One tensor: what it is, how it is cut, and which holder of each cell stored it.

    `layout` and `component` number the catalog's tables; `rotation` is for `Layout.holder`.
    """

    dtype: str
    shape: Shape
    layout: int
    rotation: int
    component: int


@dataclass(frozen=True, slots=True)
class Catalog:
    """What is stored, and by whom. The plan of a save decides it; the index records it.

    The mappings keep the order of the state and are never changed. `values` names the rank that
    stores each value that is not a tensor; `per_rank` the keys and the rank that stores each.
    `mesh` is the names and sizes of the job's mesh, slowest axis first. `parameters` are the
    tensors that were parameters when they were saved, and whether they required a gradient; empty
    where that is not known, as of a plain state dict.
    """

    world_size: int
    mesh: tuple[tuple[str, int], ...]
    components: tuple[Component, ...]
    layouts: tuple[Layout, ...]
    tensors: Mapping[str, TensorRecord]
    aliases: Mapping[str, str]
    values: Mapping[str, int]
    per_rank: Mapping[str, tuple[tuple[Key, int], ...]]
    parameters: Mapping[str, bool] = field(default_factory=dict)

    def counts(self) -> list[tuple[TensorRecord, int]]:
        """Return the tensors' records, and of how many tensors each is.

        Tensors that are alike mostly share one. It is told by identity, for to hash takes long.
        """
        records = {id(record): record for record in self.tensors.values()}
        counts = Counter(map(id, self.tensors.values()))
        return [(record, counts[number]) for number, record in records.items()]


@dataclass(frozen=True, slots=True)
class ShardFileRecord:
    """One shard file: sizes in bytes, and the digest of its first `header_nbytes` bytes."""

    component: int
    rank: int
    nbytes: int
    header_nbytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class ObjectsFileRecord:
    """One objects file: its name, size in bytes and digest."""

    name: str
    nbytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class AttachedFileRecord:
    """One file that a user has attached: under which name, its size in bytes and its digest."""

    name: str
    nbytes: int
    digest: str

    @property
    def file_name(self) -> str:
        """The name that it has in the attempt."""
        return filenames.attached_file(self.name)


# The attempt of a file of another system that is read as a checkpoint: see `interop/readers/`.
# No folder has this name, and no save creates it: its digits are random.
EMPTY_DIGESTS = "a1-ffffffffffffffff"


@dataclass(frozen=True, slots=True)
class Index:
    """A committed checkpoint. `metadata` mirrors the scalars of the user's metadata.

    `save` is the random id of the save: wherever a copy of it lies, in memory or for another
    number of ranks, it has the same, under attempts of other names. Older indexes have none.

    Built by `core/saving/transaction.py` and `tools/rewrite/reshard.py`; for a save that is
    only in memory, by `async_save/memory_restore.py`.
    """

    attempt: str
    step: int | None
    catalog: Catalog
    files: tuple[ShardFileRecord, ...]
    objects: tuple[ObjectsFileRecord, ...]
    metadata: Mapping[str, Json]
    saved_by: Mapping[str, str]
    saved_at: float
    save: str | None = None
    attached: tuple[AttachedFileRecord, ...] = ()

    @property
    def has_digests(self) -> bool:
        """Whether the blocks of its files have digests: those of other systems do not."""
        return self.attempt != EMPTY_DIGESTS

    @property
    def nbytes(self) -> int:
        """The size of all its data files."""
        tables = (self.files, self.objects, self.attached)
        return sum(one.nbytes for table in tables for one in table)

    @property
    def num_files(self) -> int:
        """The number of its data files."""
        return len(self.files) + len(self.objects) + len(self.attached)

    def file_name(self, record: ShardFileRecord) -> str:
        """Return the name of a shard file that this index lists."""
        return filenames.shard_file(self.catalog.components[record.component].stem, record.rank)


class Node(Message, frozen=True):
    """A container of the state that holds tensors: its class and its keys, in order."""

    fqn: str
    kind: str
    keys: tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Abandoned:
    """An attempt that was given up: by whom, and why."""

    attempt: str
    by: str
    reason: str
