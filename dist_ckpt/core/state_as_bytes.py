"""`dc.to_bytes`, `dc.from_bytes`, `dc.load_bytes`: the whole state of one rank as bytes.

The bytes are the files of a small checkpoint. A load opens them like any other checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from io import BytesIO
from math import prod
from mmap import mmap
from typing import Any

from msgspec.structs import replace

from dist_ckpt.core.comm.process_group import ranks_on_this_host, single_process_session
from dist_ckpt.core.commit.commit_protocol import check_receipts
from dist_ckpt.core.format import filenames
from dist_ckpt.core.format.checksums import BLOCK_DIGEST_CHARS, Buffer, document_digest
from dist_ckpt.core.format.index import index_json
from dist_ckpt.core.format.index.index import Index
from dist_ckpt.core.format.strict_json import corrupt_error
from dist_ckpt.core.loading.load import load_together
from dist_ckpt.core.loading.load_options import LoadOptions
from dist_ckpt.core.planning.mesh import cells_of
from dist_ckpt.core.planning.plan import FilePlan, FileReceipt, Inventory, Receipt, SavePlan, Whole
from dist_ckpt.core.planning.save.save_planner import items_of, plan_save
from dist_ckpt.core.planning.selection import Cast
from dist_ckpt.core.runtime.buffers import BufferPool
from dist_ckpt.core.runtime.gc_pause import paused_collector
from dist_ckpt.core.saving.local_save_state import objects_files
from dist_ckpt.core.shard_io.write import state_bytes
from dist_ckpt.core.shard_io.write.shard_writer import RankFiles, SourceOf, write_shard_files
from dist_ckpt.core.state.inventory_builder import LocalState, build_inventory
from dist_ckpt.core.state.tree.containers import MutableState, State
from dist_ckpt.core.storage import ReadableFile
from dist_ckpt.core.storage.virtual_files import FileOfBytes, ReadOnlyFiles
from dist_ckpt.errors import IncompatibleError, listed
from dist_ckpt.reports import LoadReport


def to_bytes(state: State) -> bytes:
    """Return this rank's whole state as bytes, for tests, transfer, and to embed in a program.

    The state is what `dc.save` takes: modules, optimizers, tensors, plain values. The bytes check
    themselves and depend on nothing but the state. `dc.from_bytes` and `dc.load_bytes` read them;
    they are a safetensors file as well, so any library for those gives the tensors by their names.

    Not collective: in a job each rank's bytes are its own, and a `PerRank` without a key is that of
    rank 0 in them. Of what is sharded over several ranks a rank has a part only: ValueError names
    it. Raises ValueError or TypeError for what cannot be saved. The bytes are in memory once.
    """
    group = ranks_on_this_host()
    with paused_collector():
        local = build_inventory(
            state, sharding=None, rank=0, world_size=len(group), group_ranks=group
        )
        plan = plan_save([(_of_one(local.inventory), (0,))], 1)
    local.synchronize()
    files, objects = items_of(plan, 0), objects_files(plan, local, 0, {})
    # Digests and headers have the same length whatever the data is: so the room is known before.
    blank = {file.name: _header_of(file) for file in files}
    room = len(_header(plan, files, objects, blank))
    with BytesIO() as out:
        nbytes = room + sum(file.nbytes - file.header.nbytes for file in files)
        out.seek(nbytes - 1)
        out.write(b"\0")
        writing = _DataWriter(out, room, files)
        content = RankFiles(None, files, tuple(_sources(local, file) for file in files), {})
        write_shard_files(writing, "", content, threads=1, slots=BufferPool())
        header = _header(plan, files, objects, writing.headers)
        assert len(header) == room, "no digest changes the length of the header"
        out.seek(0)
        out.write(header)
        return out.getvalue()


def _of_one(inventory: Inventory) -> Inventory:
    """Return the inventory of a job of this rank alone. ValueError names what it has a part of."""
    parts = []
    for entry in inventory.tensors:
        cells = cells_of(inventory.views[entry.view], 0, entry.shape)
        numel = cells[0].numel if len(cells) == 1 else 0
        if numel != prod(entry.shape):
            parts.append(entry.fqn)
    if parts:
        raise ValueError(
            f"{listed(parts)}: this rank holds a part of it, and the bytes of a state are one "
            "rank's whole state: gather it first (a DTensor by full_tensor(), a model by "
            "torch.distributed.checkpoint.state_dict with full_state_dict), or use dist_ckpt.save"
        )
    return replace(
        inventory,
        mesh=(),
        components=(state_bytes.COMPONENT,) if inventory.tensors else (),
        views=(Whole(),) if inventory.tensors else (),
        tensors=tuple(replace(entry, view=0, component=0) for entry in inventory.tensors),
    )


def _sources(local: LocalState, file: FilePlan) -> SourceOf:
    return lambda number: local.source(file.items[number].fqn, 0)


def _header_of(file: FilePlan) -> bytes:
    return file.header.fill(None, "0" * (file.header.num_digests * BLOCK_DIGEST_CHARS))


def _header(
    plan: SavePlan,
    files: tuple[FilePlan, ...],
    objects: dict[str, bytes],
    headers: dict[str, bytes],
) -> bytes:
    """Return what comes before the data, given the headers of the shard file, if there is one."""
    receipts: list[FileReceipt] = [
        (file.name, file.nbytes, file.header.nbytes, document_digest(headers[file.name]))
        for file in files
    ]
    receipts += [(name, len(data), 0, document_digest(data)) for name, data in objects.items()]
    shard_files, objects_records = check_receipts(plan.catalog, [Receipt(tuple(receipts), (), 0.0)])
    index = Index(
        attempt=state_bytes.ATTEMPT,
        step=None,
        catalog=plan.catalog,
        files=shard_files,
        objects=objects_records,
        metadata={},
        saved_by={},
        saved_at=0.0,
    )
    header = b"".join(headers[file.name] for file in files)
    documents = state_bytes.EncodedDocuments(index_json.encode(index), objects, header)
    return state_bytes.encode_header(documents)


class _DataWriter:
    """Writes the data of the one shard file behind `room` bytes of `out`, and keeps its header."""

    alignment = 1

    def __init__(self, out: BytesIO, room: int, files: tuple[FilePlan, ...]) -> None:
        self.headers: dict[str, bytes] = {}
        self._out = out
        self._room = room
        self._files = {file.name: file for file in files}
        self._name, self._nbytes = "", 0

    def create(self, path: str, nbytes: int) -> _DataWriter:
        """Return itself: there is one file."""
        self._name = path.rpartition("/")[2]
        self._nbytes = nbytes
        return self

    def write_at(self, offset: int, data: Buffer) -> None:
        """Put data, or the header, in its place."""
        header_nbytes = self._files[self._name].header.nbytes
        if offset < header_nbytes:
            self.headers[self._name] = bytes(data)
            return
        self._out.seek(self._room + offset - header_nbytes)
        self._out.write(data)

    def finish(self) -> int:
        """Return the size of the file."""
        return self._nbytes

    def discard(self) -> None:
        """Do nothing: the caller lets go of it all."""

    def sync(self, folder: str) -> None:
        """Do nothing: it is memory."""


# Where the files seem to lie.
_PATH = "/bytes"
_FOLDER = f"{_PATH}/{state_bytes.ATTEMPT}"


def from_bytes(data: Buffer | mmap) -> dict[Any, Any]:
    """Return the state in the bytes that `dc.to_bytes` has returned, as plain containers.

    Tensors are new ones in host memory, tied ones still tied, and what was a numpy array is one. Of
    a module it is the state dict, of an optimizer that with parameters by their names, and a
    `PerRank` is one again. `data` is bytes or anything like it, such as an mmap, and may go or
    change afterwards. Nothing in it is executed, and time and memory are bounded by its size: it
    may come from anybody. Every byte is checked: CorruptError for what is damaged,
    IncompatibleError for what is not ours, or newer.
    """
    state: dict[Any, Any] = {}
    report = load_bytes(state, data)
    if report.dropped:
        raise IncompatibleError(
            f"{listed(report.dropped)}: saved under a key of its own: use load_bytes, with a "
            "dist_ckpt.PerRank of that key in its place"
        )
    return state


def load_bytes(  # noqa: PLR0913 - the options of `dc.load`
    state: MutableState,
    data: Buffer | mmap,
    *,
    strict: bool = True,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    rename: Mapping[str, str | None] | None = None,
    cast: Cast = None,
) -> LoadReport:
    """Fill a state from the bytes that `dc.to_bytes` has returned, as `dc.load` does.

    Modules, optimizers and tensors are filled in place, in whatever layout; in a job each rank
    does it for itself, and takes of a DTensor what it holds. The options are those of `dc.load`,
    and so are the errors: until all has been checked but the tensors' data nothing is touched.
    `data` is as for `dc.from_bytes`.
    """
    try:
        view = memoryview(data).cast("B")
    except TypeError:
        raise TypeError(
            f"data is a {type(data).__name__}: give contiguous bytes, as to_bytes returns them"
        ) from None
    options = LoadOptions(
        strict=strict,
        include=include,
        exclude=exclude,
        rename=rename,
        cast=cast,
        read_once="off",
        notes=False,
    )
    with view:
        return load_together(single_process_session(), state, _PATH, options, _files_in(view))


def _files_in(view: memoryview) -> ReadOnlyFiles:
    documents, start = state_bytes.decode(view)
    files: dict[str, Callable[[], ReadableFile]] = {
        name: partial(FileOfBytes, data) for name, data in documents.objects.items()
    }
    files[filenames.INDEX] = partial(FileOfBytes, documents.index)
    if documents.header:
        name = filenames.shard_file(state_bytes.STEM, 0)
        files[name] = partial(FileOfBytes, documents.header, view[start:])
    elif start < len(view):
        raise corrupt_error(state_bytes.LABEL, "data, but no tensors")
    remedy = "the bytes of a state are only read: save to a folder"
    return ReadOnlyFiles(_FOLDER, files, remedy)
