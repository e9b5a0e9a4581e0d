"""A checkpoint of which only the documents are made: its tensors lie in files of another system.

So these files load into any layout, and are looked into and resharded, as our own are. They have no
digests: `Index.has_digests` is False, and nothing of them is compared but sizes and names.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from dist_ckpt.commit.receipts import check_receipts
from dist_ckpt.errors import CorruptError
from dist_ckpt.format import filenames, index_json, objects_file
from dist_ckpt.format.checksums import BLOCK_DIGEST_CHARS, document_digest
from dist_ckpt.format.geometry import Region, Shape
from dist_ckpt.format.index import NO_DIGESTS, Index, Node
from dist_ckpt.planning.plan import (
    FilePlan,
    FileReceipt,
    Inventory,
    Parts,
    Receipt,
    TensorEntry,
    View,
)
from dist_ckpt.planning.save_planner import items_of, plan_save
from dist_ckpt.storage import ReadableFile, Storage, real_path
from dist_ckpt.storage.read_only import FileOfBytes, ReadOnlyFiles


@dataclass(frozen=True, slots=True)
class ForeignChunk:
    """A box of a tensor: row-major and little-endian in a file, from byte `start` on."""

    region: Region
    file: str
    start: int


@dataclass(frozen=True, slots=True)
class ForeignTensor:
    """A tensor in the files of another system, and where each box of it lies."""

    fqn: str
    dtype: str
    shape: Shape
    chunks: tuple[ForeignChunk, ...]


@dataclass(frozen=True, slots=True)
class ForeignState:
    """What the files of another system hold: `tree` are the containers, as of an objects file.

    `values` are plain data by name; `metadata` is what the files say of themselves.
    """

    tensors: Sequence[ForeignTensor]
    tree: tuple[Node, ...]
    values: Mapping[str, object]
    metadata: Mapping[str, object]


def checkpoint_of(storage: Storage, path: str, state: ForeignState, what: str) -> ReadOnlyFiles:
    """Return the files of a checkpoint that seems to lie at `path`.

    `storage` has the files that the chunks name; they are opened as they are read. `what` says what
    they are, for people. CorruptError if the chunks of a tensor overlap, or do not make the whole.
    """
    held = _by_file(state.tensors)
    names = sorted(held)
    try:
        inventories = [_inventory(state, held[name], is_first=name == names[0]) for name in names]
        plan = plan_save([(one, (rank,)) for rank, one in enumerate(inventories)], len(names))
    except ValueError as error:
        raise CorruptError(f"{path}: the files do not make one state: {error}") from None
    main = objects_file.ObjectsFile(
        tree=plan.tree, values=dict(state.values), metadata=dict(state.metadata)
    )
    starts = {(one.fqn, part.region): part.start for one in state.tensors for part in one.chunks}
    documents = {filenames.OBJECTS: objects_file.encode(main)}
    files: dict[str, Callable[[], ReadableFile]] = {}
    receipts = []
    for rank, name in enumerate(names):
        written: list[FileReceipt] = []
        for file in items_of(plan, rank):
            header = _header_of(file)
            segments = [
                Segment(item.span.start, starts[item.fqn, _region(item.cell)], item.span.nbytes)
                for item in file.items
            ]
            files[file.name] = partial(_open, storage, name, header, segments)
            digest = document_digest(header)
            written.append((file.name, file.nbytes, file.header.nbytes, digest))
        if not rank:
            written += [(n, len(data), 0, document_digest(data)) for n, data in documents.items()]
        receipts.append(Receipt(tuple(written), (), 0.0))
    shard_files, objects = check_receipts(plan.catalog, receipts)
    index = Index(
        attempt=NO_DIGESTS,
        step=None,
        catalog=plan.catalog,
        files=shard_files,
        objects=objects,
        metadata={},
        saved_by={"foreign": what},
        saved_at=0.0,
    )
    documents[filenames.INDEX] = index_json.encode(index)
    files.update((name, partial(FileOfBytes, data)) for name, data in documents.items())
    remedy = f"these are {what}, which are only read: save, reshard or import to another path"
    return ReadOnlyFiles(f"{path}/{NO_DIGESTS}", files, remedy)


# What one file has: tensors, each with the boxes of it that are there.
_Held = list[tuple[ForeignTensor, tuple[Region, ...]]]


def _by_file(tensors: Sequence[ForeignTensor]) -> dict[str, _Held]:
    held: dict[str, _Held] = {}
    for tensor in tensors:
        cells: dict[str, list[Region]] = {}
        for chunk in tensor.chunks:
            cells.setdefault(chunk.file, []).append(chunk.region)
        for file, regions in cells.items():
            held.setdefault(file, []).append((tensor, tuple(regions)))
    return held or {"": []}


def _inventory(state: ForeignState, held: _Held, *, is_first: bool) -> Inventory:
    """Return what a rank would hold that had just one of the files."""
    components: dict[str, int] = {}
    views: dict[View, int] = {}
    entries = []
    for tensor, cells in held:
        component = components.setdefault(tensor.fqn.partition(".")[0], len(components))
        view = views.setdefault(Parts(cells), len(views))
        entries.append(TensorEntry(tensor.fqn, tensor.dtype, tensor.shape, view, component))
    return Inventory(
        mesh=(),
        components=tuple(components),
        views=tuple(views),
        tensors=tuple(entries),
        aliases=(),
        values=tuple(state.values) if is_first else (),
        per_rank=(),
        tree=state.tree,
        name_lists=(),
        numpy=(),
    )


def _header_of(file: FilePlan) -> bytes:
    """Return a shard file's header, whose digests nobody looks at."""
    return file.header.fill(None, "0" * (file.header.num_digests * BLOCK_DIGEST_CHARS))


def _region(cell: object) -> Region:
    assert isinstance(cell, Region), "as the inventory has it"
    return cell


@dataclass(frozen=True, slots=True)
class Segment:
    """Bytes of a file's data section that lie in another file, from `there` on."""

    start: int
    there: int
    nbytes: int


def _open(storage: Storage, path: str, header: bytes, segments: Sequence[Segment]) -> ReadableFile:
    return _VirtualFile(storage.open(real_path(path)), header, segments)


class _VirtualFile:
    """A shard file: its header, and behind that what lies in another file."""

    num_links = 1

    def __init__(self, inner: ReadableFile, header: bytes, segments: Sequence[Segment]) -> None:
        self._inner = inner
        self._header = header
        self._segments = segments
        self._starts = [segment.start for segment in segments]

    @property
    def nbytes(self) -> int:
        """Its size, whatever of that the other file has."""
        return (
            len(self._header)
            + sum(segment.nbytes for segment in self._segments[-1:])
            + (self._starts[-1] if self._starts else 0)
        )

    def read_into(self, offset: int, target: memoryview) -> int:
        """See `ReadableFile.read_into`."""
        head = self._header[offset:][: len(target)]
        target[: len(head)] = head
        done = len(head)
        while done < len(target):
            at = offset + done - len(self._header)
            number = bisect_right(self._starts, at) - 1
            # Of those that begin at one place the last has bytes.
            segment = self._segments[number]
            within = at - segment.start
            wanted = min(len(target) - done, segment.nbytes - within)
            if wanted <= 0:
                break
            count = self._inner.read_into(segment.there + within, target[done : done + wanted])
            done += count
            if count < wanted:
                break
        return done

    def close(self) -> None:
        """See `ReadableFile.close`."""
        self._inner.close()
