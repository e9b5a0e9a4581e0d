"""The index as values: what makes a checkpoint. `index_json.py` encodes it as one JSON document.

A checkpoint exists if and only if its index has the state "committed". An abandoned attempt has an
index with the state "abandoned" and no contents. `docs/format.md` has the fields.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dist_ckpt.core.format import filenames
from dist_ckpt.core.format.geometry import Layout, Shape
from dist_ckpt.core.format.strict_json import Json
from dist_ckpt.core.runtime.typed_msgpack import Message

MAX_STEP = (1 << 63) - 1

# Limits for the files attached to a checkpoint: their number and total size. Saves and reshards
# have them in memory.
MAX_ATTACHED = 100
MAX_ATTACHED_NBYTES = 64 << 20

# The key of a per-rank value: the rank, or the user's name for it, such as ("dp", 3).
MAX_KEY_DEPTH = 8
if TYPE_CHECKING:
    Key = int | str | tuple["Key", ...]
else:  # for decoding messages: limited depth
    Key = int | str
    for _ in range(MAX_KEY_DEPTH):
        Key = int | str | tuple[Key, ...]


# The listed modules of a model, by their paths in it: a version, all metadata of the module, or
# None if it has none. `planning/module_versions.py` has the defaults of the others.
ListedVersions = Mapping[str, Json]


@dataclass(frozen=True, slots=True)
class Component:
    """A top-level key of the state that has tensors, or a part of one."""

    name: str  # the key; its parts share it
    stem: str  # the start of its shard files' names


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """One tensor, as the catalog lists it."""

    dtype: str
    shape: Shape
    layout: int  # a number in `Catalog.layouts`
    rotation: int  # see `Layout.holder`
    component: int  # a number in `Catalog.components`


@dataclass(frozen=True, slots=True)
class Fusion:
    """The matrices in a fused tensor: their sizes along dimension `dim`, one after another."""

    dim: int
    sizes: Shape


@dataclass(frozen=True, slots=True)
class Catalog:
    """The stored tensors and values, and the rank that stored each: decided by a save plan.

    The mappings have the order of the state and never change.
    """

    world_size: int
    mesh: tuple[tuple[str, int], ...]  # axis names and sizes, slowest axis first
    components: tuple[Component, ...]
    layouts: tuple[Layout, ...]
    tensors: Mapping[str, TensorRecord]
    aliases: Mapping[str, str]  # fqn -> fqn of the tensor with the same memory
    values: Mapping[str, int]  # fqn of a value that is not a tensor -> the rank that stored it
    per_rank: Mapping[str, tuple[tuple[Key, int], ...]]  # fqn -> its keys, with their ranks
    # fqn of a parameter -> whether it required a gradient. Empty for a plain state dict.
    parameters: Mapping[str, bool] = field(default_factory=dict)
    # fqn of a tensor -> its pieces, if the ShardingConfig of the save named them
    fused: Mapping[str, Fusion] = field(default_factory=dict)
    # The versions of each model's modules, by its name in the state. None if they are unknown, as
    # in checkpoints from before 2026-12. A model that is not listed has no versions.
    versions: Mapping[str, ListedVersions] | None = None
    # fqn -> the rule of the save for its copies on several ranks: "rank0", "mean" or "per_rank"
    replicas: Mapping[str, str] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """All saved names."""
        return (*self.tensors, *self.aliases, *self.values, *self.per_rank)

    def counts(self) -> list[tuple[TensorRecord, int]]:
        """Return each tensor record, which equal tensors share, and its number of tensors."""
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
    """One attached file: its name for the user, its size in bytes and its digest."""

    name: str
    nbytes: int
    digest: str

    @property
    def file_name(self) -> str:
        """The name of the file in the attempt."""
        return filenames.attached_file(self.name)


# The attempt's name for a file of another system that is read as a checkpoint (`interop/readers/`).
# No folder has this name: a save draws random digits.
FOREIGN_ATTEMPT = "a1-ffffffffffffffff"

FileRecord = ShardFileRecord | ObjectsFileRecord | AttachedFileRecord


@dataclass(frozen=True, slots=True)
class Index:
    """A committed checkpoint."""

    attempt: str
    step: int | None
    catalog: Catalog
    files: tuple[ShardFileRecord, ...]
    objects: tuple[ObjectsFileRecord, ...]
    metadata: Mapping[str, Json]  # the scalars of the user's metadata
    saved_by: Mapping[str, str]
    saved_at: float
    # The random id of the save, which copies keep under other attempts. Older indexes have none.
    save: str | None = None
    attached: tuple[AttachedFileRecord, ...] = ()

    @property
    def key(self) -> tuple[int, filenames.Attempt] | None:
        """The step and the attempt, to which annotations refer; None without a step."""
        return None if self.step is None else (self.step, filenames.Attempt.from_name(self.attempt))

    @property
    def has_digests(self) -> bool:
        """True if the blocks of its files have digests; False for files of other systems."""
        return self.attempt != FOREIGN_ATTEMPT

    @property
    def nbytes(self) -> int:
        """The size of all data files."""
        tables = (self.files, self.objects, self.attached)
        return sum(record.nbytes for table in tables for record in table)

    @property
    def num_files(self) -> int:
        """The number of data files."""
        return len(self.files) + len(self.objects) + len(self.attached)

    @property
    def all_files(self) -> dict[str, FileRecord]:
        """The records of all data files, by file name."""
        shards = {self.file_name(record): record for record in self.files}
        attached = {record.file_name: record for record in self.attached}
        return {**shards, **{record.name: record for record in self.objects}, **attached}

    def file_name(self, record: ShardFileRecord) -> str:
        """Return the name of a shard file in this index."""
        return filenames.shard_file(self.catalog.components[record.component].stem, record.rank)


# How a tensor of an optimizer was that is not cut with its parameter: see `ObjectsFile.uncut`.
WHOLE, JOINED = "whole", "joined"


class Node(Message, frozen=True):
    """A container of the state: its class and its keys, in order."""

    fqn: str
    kind: str
    keys: tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Abandoned:
    """An attempt that was given up: by whom, and why."""

    attempt: str
    by: str
    reason: str
