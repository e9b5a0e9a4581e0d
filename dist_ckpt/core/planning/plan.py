"""The values that planners take and return: inventories, plans, receipts.

An `Inventory` has meshes and placements instead of boxes. So the inventories of most ranks are
equal, and an equal one is sent and planned once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from dist_ckpt.core.format.geometry import (
    Cell,
    ElementRange,
    Layout,
    Region,
    RegionPiece,
    Shape,
    contiguous_range,
)
from dist_ckpt.core.format.index.index import Catalog, Key, Node
from dist_ckpt.core.format.shard_file import HeaderText, StoredShard
from dist_ckpt.core.planning.replica_rules import ReplicaRule
from dist_ckpt.core.planning.tensor_views import View
from dist_ckpt.core.runtime.typed_msgpack import Message

# The id of a replica group, and the digest of each of its members, with the name.
ReplicaDigests = tuple[tuple[str, tuple[tuple[str, str], ...]], ...]


# --- inventories -----------------------------------------------------------------------------


class TensorEntry(Message, frozen=True):
    """One tensor on one rank."""

    fqn: str
    dtype: str
    shape: Shape  # global, but local under a `RuleSharded` view
    view: int  # a number in `Inventory.views`
    component: int  # a number in `Inventory.components`


class NameList(Message, frozen=True):
    """A list of names with parts on different ranks, such as the names of an optimizer group."""

    fqn: str
    names: tuple[str, ...]


class Inventory(Message, frozen=True):
    """The tensors and values of one rank: names and layouts, without data."""

    mesh: tuple[tuple[str, int], ...]
    components: tuple[str, ...]
    views: tuple[View, ...]
    tensors: tuple[TensorEntry, ...]
    aliases: tuple[tuple[str, str], ...]  # (fqn, fqn of the tied tensor)
    values: tuple[str, ...]  # fqns
    # (fqn, key). The key None means the number of the rank, so that similar ranks send the same
    # bytes.
    per_rank: tuple[tuple[str, Key | None], ...]
    tree: tuple[Node, ...]
    name_lists: tuple[NameList, ...]
    numpy: tuple[str, ...]  # fqns of tensors that are numpy arrays
    parameters: tuple[tuple[int, int, bool], ...] = ()  # (first, count, trainable) in `tensors`
    linkable: tuple[str, ...] = ()  # fqns of tensors with files that later saves can link
    objects: tuple[str, ...] = ()  # fqns of objects whose `state_dict` is saved
    # (model, the entries of its modules as JSON), as in `Catalog.versions`; None if unknown
    versions: tuple[tuple[str, str], ...] | None = None
    has_text_keys: bool = False  # DCP has flattened the state
    replicas: tuple[tuple[str, ReplicaRule], ...] = ()  # (fqn, rule)
    uncut: tuple[tuple[str, str], ...] = ()  # as in `ObjectsFile`


# --- saving ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SavePlan:
    """The ranks that store each cell and value. `plan_rank_files` returns the files of one rank."""

    catalog: Catalog
    unsplit_layouts: Mapping[str, Layout]  # before the split, for each tensor that the save splits
    value_holders: Mapping[str, tuple[int, ...]]
    per_rank_holders: Mapping[str, tuple[tuple[Key, tuple[int, ...]], ...]]
    tree: tuple[Node, ...]
    name_lists: tuple[NameList, ...]
    numpy: tuple[str, ...]
    linkable: frozenset[int] = frozenset()  # components with files that later saves can link
    objects: tuple[str, ...] = ()
    has_text_keys: bool = False
    uncut: tuple[tuple[str, str], ...] = ()


class BatchPart(NamedTuple):
    """One block: the bytes `start` to `stop` of item number `item`, which has `nbytes`."""

    item: int
    nbytes: int
    start: int
    stop: int


class Batch(NamedTuple):
    """Adjacent blocks. The first is number `first_block` of the file, at `start` of its data."""

    first_block: int
    start: int
    parts: tuple[BatchPart, ...]


@dataclass(frozen=True, slots=True)
class FilePlan:
    """A shard file to write."""

    name: str
    header: HeaderText
    nbytes: int
    items: tuple[StoredShard, ...]
    block_nbytes: int
    batches: tuple[Batch, ...]
    is_linkable: bool = False  # later saves can link the file, so it contains no step


@dataclass(frozen=True, slots=True)
class ReplicaGroup:
    """Tensors and values, also per-rank values, that must be equal on the ranks that have them."""

    ranks: tuple[int, ...]
    cells: tuple[tuple[str, Cell], ...]
    values: tuple[str, ...]


class FileReceipt(NamedTuple):
    """A file that a rank wrote, and the digest of its header, or of a file without a header."""

    name: str
    nbytes: int
    header_nbytes: int  # 0 if the file has no header
    digest: str


class Receipt(Message, frozen=True):
    """The files that a rank wrote. All ranks must have the same digest for a replica group."""

    files: tuple[FileReceipt, ...]
    replicas: tuple[tuple[str, str], ...]  # (group id, digest)
    seconds: float
    linked: tuple[int, int] = (0, 0)  # files, and bytes, that were linked and not written


# --- loading ---------------------------------------------------------------------------------


class TensorRequest(NamedTuple):
    """A tensor that a rank requests, and the cells that it will fill."""

    fqn: str
    dtype: str
    shape: Shape
    cells: tuple[Cell, ...]


@dataclass(frozen=True, slots=True)
class CellOverlap:
    """The common box of a stored cell and a requested cell. Tensors with equal cuts share it.

    Both pieces are row-major. `contiguous` is None unless the box is contiguous in both memories.
    """

    stored: Cell
    stored_piece: RegionPiece  # the piece of the stored cell that contains the box
    requested_number: int  # the number of the requested cell
    requested_piece: RegionPiece  # the piece of the requested cell that contains the box
    common: Region
    contiguous: ElementRange | None  # the box in the stored cell's memory
    shift: int  # added to an offset of `contiguous`: the offset in the requested cell's memory
    is_whole: bool  # the cells are equal, and the box is the whole cell

    @staticmethod
    def of(
        stored: Cell,
        stored_piece: RegionPiece,
        number: int,
        requested: Cell,
        requested_piece: RegionPiece,
        common: Region,
    ) -> CellOverlap:
        """Return the overlap of a piece of a stored cell and a piece of requested cell `number`."""
        contiguous = contiguous_range(common, stored_piece)
        requested_range = contiguous_range(common, requested_piece)
        shift, is_whole = 0, False
        if contiguous is not None and requested_range is not None:
            shift = requested_range.start - contiguous.start
            is_whole = stored == requested and common.numel == requested.numel
        else:
            contiguous = None
        return CellOverlap(
            stored, stored_piece, number, requested_piece, common, contiguous, shift, is_whole
        )


@dataclass(frozen=True, slots=True)
class ReadItem:
    """The copy of an overlap from a stored cell of `tensor`. `fqn` is `tensor` or its alias."""

    fqn: str
    tensor: str
    dtype: str
    overlap: CellOverlap


# The reads of one rank: the items of each shard file, by the ascending number of the file.
LoadPlan = Mapping[int, tuple[ReadItem, ...]]
