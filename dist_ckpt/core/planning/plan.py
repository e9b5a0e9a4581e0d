"""The values that planners take and return: views of tensors, inventories, plans, receipts.

A rank's `Inventory` is symbolic: it names the mesh and the placements instead of listing boxes,
so that ranks with the same view of the state send the same bytes, and it holds no data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from dist_ckpt.core.format.geometry import Cell, ElementRange, Region, RegionPiece, Shape, run_of
from dist_ckpt.core.format.index.index import Catalog, Key, Node
from dist_ckpt.core.format.layout import Layout
from dist_ckpt.core.format.shard_file import HeaderText, StoredShard
from dist_ckpt.core.planning.write_batches import Batch
from dist_ckpt.core.runtime.typed_msgpack import Message

# A replica group by its id, with the digest of each of its members, by name.
ReplicaDigests = tuple[tuple[str, tuple[tuple[str, str], ...]], ...]

# (name, nbytes, header_nbytes, digest), as in `Receipt.files`.
FileReceipt = tuple[str, int, int, str]


# --- inventories -----------------------------------------------------------------------------


class Mesh(Message, frozen=True, cache_hash=True):
    """Ranks arranged in a box, row-major; `names` are its axes, "" where they have none."""

    names: tuple[str, ...]
    shape: Shape
    ranks: tuple[int, ...]


class Replicate(Message, frozen=True, tag=True):
    """Every rank along the mesh axis holds the same."""


class Shard(Message, frozen=True, tag=True):
    """The mesh axis cuts this dimension as `torch.chunk` does."""

    dim: int


class StridedShard(Message, frozen=True, tag=True):
    """The mesh axis cuts each of `split_factor` chunks of the dimension (FSDP2 over TP)."""

    dim: int
    split_factor: int


Placement = Replicate | Shard | StridedShard


class Whole(Message, frozen=True, tag=True):
    """A tensor that the rank holds whole: a replica of what the other ranks hold."""


class MeshPlaced(Message, frozen=True, tag=True):
    """A tensor laid over a mesh, one placement a mesh axis (DTensor)."""

    mesh: Mesh
    placements: tuple[Placement, ...]


class Flattened(Message, frozen=True, tag=True):
    """A tensor cut, in row-major order, into even element ranges, one a rank (ZeRO)."""

    mesh: Mesh


class Parts(Message, frozen=True, tag=True):
    """Explicit cells that this rank holds (LocalShard, FlatShard, third-party shards)."""

    cells: tuple[Cell, ...]


class RuleSharded(Message, frozen=True, tag=True):
    """A local tensor under a ShardingConfig: `axes[d]` are the mesh axes that cut dimension d.

    The parts may be uneven; the global shape is the sum of the parts, known to the planner only.
    """

    mesh: Mesh
    axes: tuple[tuple[int, ...], ...]


View = Whole | MeshPlaced | Flattened | Parts | RuleSharded


class TensorEntry(Message, frozen=True):
    """One tensor as one rank sees it: `shape` is global, but local under a `RuleSharded` view.

    `view` and `component` number the inventory's tables.
    """

    fqn: str
    dtype: str
    shape: Shape
    view: int
    component: int


class NameList(Message, frozen=True):
    """A list of names whose parts are on different ranks, such as an optimizer group's."""

    fqn: str
    names: tuple[str, ...]


class Inventory(Message, frozen=True):
    """What one rank says it holds. `components` are the names that tensors' entries number.

    `aliases` are (fqn, fqn of the tensor that it is tied to); `values` are the fqns of the values
    that are not tensors; `per_rank` are (fqn, key), where None stands for the rank itself, so that
    ranks that differ in nothing else send the same; `numpy` are the fqns of the tensors that are
    numpy arrays in the state. `parameters` are (first, count, trainable) of runs of `tensors`.
    `reused` are the fqns of the tensors that get files of their own, to be linked by later saves.
    """

    mesh: tuple[tuple[str, int], ...]
    components: tuple[str, ...]
    views: tuple[View, ...]
    tensors: tuple[TensorEntry, ...]
    aliases: tuple[tuple[str, str], ...]
    values: tuple[str, ...]
    per_rank: tuple[tuple[str, Key | None], ...]
    tree: tuple[Node, ...]
    name_lists: tuple[NameList, ...]
    numpy: tuple[str, ...]
    parameters: tuple[tuple[int, int, bool], ...] = ()
    reused: tuple[str, ...] = ()


# --- saving ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SavePlan:
    """Who stores what, the same on every rank; `items_of` derives one rank's part of it.

    `held_layouts` has the layout in which the ranks hold a tensor where it is stored in a finer
    one: a large replica is split among its holders. `value_holders` are the ranks that hold each
    value, `per_rank_holders` those that hold each key of a value per rank. `reused` numbers the
    components whose files later saves may link to.
    """

    catalog: Catalog
    held_layouts: Mapping[str, Layout]
    value_holders: Mapping[str, tuple[int, ...]]
    per_rank_holders: Mapping[str, tuple[tuple[Key, tuple[int, ...]], ...]]
    tree: tuple[Node, ...]
    name_lists: tuple[NameList, ...]
    numpy: tuple[str, ...]
    reused: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class FilePlan:
    """One shard file to write.

    `batches` are its items as they are written, in blocks of `block_nbytes`. `is_reused`: later
    saves may link to it, so that it says of no step that it is of it.
    """

    name: str
    header: HeaderText
    nbytes: int
    items: tuple[StoredShard, ...]
    block_nbytes: int
    batches: tuple[Batch, ...]
    is_reused: bool = False


@dataclass(frozen=True, slots=True)
class ReplicaGroup:
    """Tensors and values, per-rank ones too, that the same ranks hold; all must be equal."""

    ranks: tuple[int, ...]
    cells: tuple[tuple[str, Cell], ...]
    values: tuple[str, ...]


class Receipt(Message, frozen=True):
    """What a rank wrote: (name, nbytes, header_nbytes, digest) of each file.

    An objects file has no header: its `header_nbytes` is 0 and the digest is of the whole file.
    `replicas` are (group id, digest) of each replica group that the rank belongs to: all ranks
    that name a group must have the same digest for it. `linked` are files, and bytes, that were not
    written but linked.
    """

    files: tuple[FileReceipt, ...]
    replicas: tuple[tuple[str, str], ...]
    seconds: float
    linked: tuple[int, int] = (0, 0)


# --- loading ---------------------------------------------------------------------------------


class TensorRequest(NamedTuple):
    """A tensor that a rank wants, and the cells of it that it will fill."""

    fqn: str
    dtype: str
    shape: Shape
    cells: tuple[Cell, ...]


@dataclass(frozen=True, slots=True)
class CellOverlap:
    """A box `common` of a stored cell and a wanted one, for all tensors that are cut alike.

    `source` and `target` are the pieces of the stored cell and of wanted cell number `part` that
    hold it: both are row-major, so with them an element's place in memory is known. `run` is where
    its elements lie in the stored cell's memory, if they are one run there, and one in the wanted
    cell's, `shift` elements further on; None if they are scattered in either. `is_whole`: the two
    are the same cell, and nothing else of either is to be copied.
    """

    stored: Cell
    source: RegionPiece
    part: int
    target: RegionPiece
    common: Region
    run: ElementRange | None
    shift: int
    is_whole: bool

    @staticmethod
    def of(
        stored: Cell,
        source: RegionPiece,
        part: int,
        wanted: Cell,
        target: RegionPiece,
        common: Region,
    ) -> CellOverlap:
        """Return the match of pieces of a stored cell and of wanted cell number `part`."""
        run, there = run_of(common, source), run_of(common, target)
        if run is None or there is None:
            return CellOverlap(stored, source, part, target, common, None, 0, is_whole=False)
        is_whole = stored == wanted and common.numel == wanted.numel
        return CellOverlap(
            stored, source, part, target, common, run, there.start - run.start, is_whole
        )


@dataclass(frozen=True, slots=True)
class ReadItem:
    """Copy the elements of a match from a stored cell into a wanted one.

    `tensor` is the name under which it is stored: another than `fqn` where that is an alias.
    """

    fqn: str
    tensor: str
    dtype: str
    match: CellOverlap


# What one rank reads: the items that each shard file serves, by the file's number in the index,
# ascending.
LoadPlan = Mapping[int, tuple[ReadItem, ...]]
