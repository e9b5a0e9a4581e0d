"""`dc.to_bytes`, `dc.from_bytes`, `dc.load_bytes`: the whole state of one rank as bytes.

The bytes are the files of a small checkpoint, in one safetensors file: the index and the objects
files are in its header. First in `__metadata__` are these documents, then it is a shard file: see
`docs/format.md`. A load opens the files like those of any other checkpoint.
"""

from __future__ import annotations

import json
from base64 import b64encode
from binascii import Error, a2b_base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from io import BytesIO
from math import prod
from mmap import mmap
from typing import Any

from msgspec.structs import replace

from dist_ckpt.core.comm.process_group import ranks_on_this_host, single_process_session
from dist_ckpt.core.commit.commit_protocol import checked_file_tables
from dist_ckpt.core.format import filenames, strict_json
from dist_ckpt.core.format.checksums import BLOCK_DIGEST_CHARS, Buffer, document_digest
from dist_ckpt.core.format.index import index_json
from dist_ckpt.core.format.index.index import Index
from dist_ckpt.core.format.shard_file import ALIGNMENT, MAX_HEADER_NBYTES
from dist_ckpt.core.format.strict_json import check_version, corrupt_error
from dist_ckpt.core.loading.load import load_together
from dist_ckpt.core.loading.load_options import LoadOptions
from dist_ckpt.core.planning.mesh import cells_of
from dist_ckpt.core.planning.plan import FilePlan, FileReceipt, Inventory, Receipt, SavePlan, Whole
from dist_ckpt.core.planning.save.save_planner import files_of_rank, plan_save
from dist_ckpt.core.planning.selection import Cast
from dist_ckpt.core.runtime.gc_pause import paused_collector
from dist_ckpt.core.saving.local_save_state import objects_files
from dist_ckpt.core.shard_io.write.shard_writer import RankFiles, SourceOf, write_all
from dist_ckpt.core.state.inventory_builder import LocalState, build_inventory
from dist_ckpt.core.state.tree.containers import MutableState, State
from dist_ckpt.core.storage import ReadableFile
from dist_ckpt.core.storage.virtual_files import FileOfBytes, ReadOnlyFiles
from dist_ckpt.errors import IncompatibleError, listed
from dist_ckpt.reports import LoadReport

# The name of the attempt, which has no folder.
_ATTEMPT = "a1-0000000000000000"

# The component of all tensors, and the stem of its file.
_COMPONENT = _STEM = "state"

_LABEL = "the bytes of a state"

_START = '{"__metadata__":{'
_INDEX, _OBJECTS, _PER_RANK = "dist_ckpt_index", "dist_ckpt_objects", "dist_ckpt_per_rank"
# The rest of the header of a state without tensors, which has no shard file.
_NO_SHARDS = '"format":"pt"}}'

# How an index begins: each of these fields is in it once.
_INDEX_START = (
    '{"format":{"version":1,"requires":[]},"state":"committed",'
    f'"attempt":"{_ATTEMPT}","step":null,"world_size":1,'
)

_OBJECTS_FILES = {_OBJECTS: filenames.OBJECTS, _PER_RANK: filenames.objects_file(0)}
_DECODER = json.JSONDecoder()


def to_bytes(state: State) -> bytes:
    """Return this rank's whole state as bytes, for tests, for transfer, or to embed in a program.

    The state is as for `dc.save`: modules, optimizers, tensors, plain values. The bytes have
    checksums, and depend only on the state. `dc.from_bytes` and `dc.load_bytes` read them. They are
    also a safetensors file, from which any such library reads the tensors by name.

    Not collective: each rank has separate bytes, in which a `PerRank` without a key is that of rank
    0. ValueError names tensors that are sharded over several ranks. Raises ValueError or TypeError
    for a state that cannot be saved. The bytes are in memory once.
    """
    group = ranks_on_this_host()
    with paused_collector():
        local = build_inventory(
            state, sharding=None, rank=0, world_size=len(group), group_ranks=group
        )
        plan = plan_save([(_single_rank_inventory(local.inventory), (0,))], 1)
    local.synchronize()
    files, objects = files_of_rank(plan, 0), objects_files(plan, local, 0, {})
    # The length of digests and headers does not depend on the data, so it is computed first.
    blank = {}
    for file in files:
        digests = "0" * (file.header.num_digests * BLOCK_DIGEST_CHARS)
        blank[file.name] = file.header.fill(None, digests)
    start = len(_header(plan, files, objects, blank))
    with BytesIO() as out:
        nbytes = start + sum(file.nbytes - file.header.nbytes for file in files)
        out.seek(nbytes - 1)
        out.write(b"\0")
        writing = _DataWriter(out, start, {file.name: file for file in files})
        content = RankFiles(None, files, tuple(_sources(local, file) for file in files), {})
        write_all(writing, "", content, threads=1)
        header = _header(plan, files, objects, writing.headers)
        assert len(header) == start, "no digest changes the length of the header"
        out.seek(0)
        out.write(header)
        return out.getvalue()


def _single_rank_inventory(inventory: Inventory) -> Inventory:
    """Return the inventory of a job with only this rank. ValueError names sharded tensors."""
    parts = []
    for entry in inventory.tensors:
        cells = cells_of(inventory.views[entry.view], 0, entry.shape)
        if (cells[0].numel if len(cells) == 1 else 0) != prod(entry.shape):
            parts.append(entry.fqn)
    if parts:
        raise ValueError(
            f"{listed(parts)}: this rank has only a part of it, and the bytes of a state are one "
            "rank's whole state. Use dist_ckpt.save, or gather it first: a DTensor by "
            "full_tensor(), a model by torch.distributed.checkpoint.state_dict with full_state_dict"
        )
    return replace(
        inventory,
        mesh=(),
        components=(_COMPONENT,) if inventory.tensors else (),
        views=(Whole(),) if inventory.tensors else (),
        tensors=tuple(replace(entry, view=0, component=0) for entry in inventory.tensors),
    )


def _sources(local: LocalState, file: FilePlan) -> SourceOf:
    return lambda number: local.source(file.items[number].fqn, 0)


def _header(
    plan: SavePlan,
    files: tuple[FilePlan, ...],
    objects: dict[str, bytes],
    headers: dict[str, bytes],
) -> bytes:
    """Return the bytes before the data. `headers` has the header of the shard file, if any."""
    receipts: list[FileReceipt] = [
        (file.name, file.nbytes, file.header.nbytes, document_digest(headers[file.name]))
        for file in files
    ]
    receipts += [(name, len(data), 0, document_digest(data)) for name, data in objects.items()]
    shard_files, objects_records = checked_file_tables(
        plan.catalog, [Receipt(tuple(receipts), (), 0.0)]
    )
    index = Index(
        attempt=_ATTEMPT,
        step=None,
        catalog=plan.catalog,
        files=shard_files,
        objects=objects_records,
        metadata={},
        saved_by={},
        saved_at=0.0,
    )
    header = b"".join(headers[file.name] for file in files)
    documents = EncodedDocuments(index_json.encode(index), objects, header)
    return encode_header(documents)


@dataclass(slots=True)
class _DataWriter:
    """A storage for the one shard file: writes its data to `out`, and returns its header."""

    out: BytesIO
    start: int
    files: Mapping[str, FilePlan]
    alignment: int = 1
    headers: dict[str, bytes] = field(default_factory=dict)
    _name: str = ""
    _nbytes: int = 0

    def create(self, path: str, nbytes: int) -> _DataWriter:
        """Return this object: there is only one file."""
        self._name = path.rpartition("/")[2]
        self._nbytes = nbytes
        return self

    def write_at(self, offset: int, data: Buffer) -> None:
        """Write data to `out`, or store the header."""
        header_nbytes = self.files[self._name].header.nbytes
        if offset < header_nbytes:
            self.headers[self._name] = bytes(data)
            return
        self.out.seek(self.start + offset - header_nbytes)
        self.out.write(data)

    def finish(self) -> int:
        """Return the size of the file."""
        return self._nbytes

    def discard(self) -> None:
        """Do nothing: the caller drops the whole buffer."""

    def sync(self, folder: str) -> None:
        """Do nothing: it is memory."""


# The path of the checkpoint in messages.
_PATH = "/bytes"
_FOLDER = f"{_PATH}/{_ATTEMPT}"


def from_bytes(data: Buffer | mmap) -> dict[Any, Any]:
    """Return the state of bytes from `dc.to_bytes`, as plain containers.

    Tensors are new, in host memory; tied tensors stay tied, and numpy arrays stay numpy arrays. A
    module becomes its state dict, an optimizer its state dict with parameters by name. A `PerRank`
    stays one. `data` is bytes or a buffer such as an mmap, and may be closed or changed afterwards.
    It may come from an untrusted source: nothing in it is executed, and its size bounds time and
    memory. Every byte is checked: CorruptError for damaged data, IncompatibleError for another
    format or a newer version.
    """
    state: dict[Any, Any] = {}
    report = load_bytes(state, data)
    if report.dropped:
        raise IncompatibleError(
            f"{listed(report.dropped)}: saved under a separate key: use load_bytes, with a "
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
    """Fill a state from bytes of `dc.to_bytes`, as `dc.load` does.

    Modules, optimizers and tensors are filled in place, in any layout. In a job each rank calls it
    by itself, and takes its part of a DTensor. Options and errors are those of `dc.load`: nothing
    is changed before the check of everything but the tensor data. `data` is as for `dc.from_bytes`.
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
        record_verified=False,
    )
    with view:
        return load_together(single_process_session(), state, _PATH, options, _files_in(view))


def _files_in(view: memoryview) -> ReadOnlyFiles:
    documents, start = decode_documents(view)
    files: dict[str, Callable[[], ReadableFile]] = {
        name: partial(FileOfBytes, data) for name, data in documents.objects.items()
    }
    files[filenames.INDEX] = partial(FileOfBytes, documents.index)
    if documents.header:
        name = filenames.shard_file(_STEM, 0)
        files[name] = partial(FileOfBytes, documents.header, view[start:])
    elif start < len(view):
        raise corrupt_error(_LABEL, "data, but no tensors")
    remedy = "the bytes of a state are only read: save to a folder"
    return ReadOnlyFiles(_FOLDER, files, remedy)


# --- the format: documents in a safetensors header ----------------------------------------------


@dataclass(frozen=True, slots=True)
class EncodedDocuments:
    """The encoded documents of a checkpoint by one rank. `header` is b"" without a shard file."""

    index: bytes
    objects: dict[str, bytes]
    header: bytes


def encode_header(documents: EncodedDocuments) -> bytes:
    """Return all before the tensors' data. ValueError if it is longer than safetensors reads."""
    index = json.dumps(documents.index.decode("utf-8"), ensure_ascii=False)
    fields = [f'"{_INDEX}":{index}']
    for key, name in _OBJECTS_FILES.items():
        encoded = b64encode(documents.objects.get(name, b"")).decode("ascii")
        fields.append(f'"{key}":"{encoded}"')
    rest = documents.header[8:].rstrip(b" ").decode("utf-8").removeprefix(_START) or _NO_SHARDS
    text = ",".join([_START + fields[0], *fields[1:], rest]).encode("utf-8")
    room = -(-(8 + len(text)) // ALIGNMENT) * ALIGNMENT - 8
    if room > MAX_HEADER_NBYTES:
        raise ValueError(
            f"names, plain data and per-rank values need a header of {room} bytes, more than the "
            f"{MAX_HEADER_NBYTES} that safetensors reads: store large data as tensors, or use "
            "dist_ckpt.save"
        )
    return room.to_bytes(8, "little") + text.ljust(room)


def decode_documents(data: memoryview) -> tuple[EncodedDocuments, int]:
    """Return the documents in the bytes of a state, and the offset of the tensors' data.

    CorruptError unless `encode_header` wrote them, IncompatibleError for other formats or newer
    versions. The index is valid on return; objects and header are not checked against it.
    """
    header = 8 + int.from_bytes(data[:8], "little")
    if len(data) < 8 or header > min(len(data), 8 + MAX_HEADER_NBYTES):
        raise corrupt_error(_LABEL, f"{len(data)} bytes are too few for a header")
    raw = bytes(data[:header])
    try:
        documents = _documents(raw[8:].decode("utf-8").rstrip(" "))
    except (ValueError, Error, RecursionError) as error:
        raise corrupt_error(_LABEL, f"its header is not as dist_ckpt writes it: {error}") from None
    # Each header has exactly one form, so it cannot contain anything that is not checked.
    if encode_header(documents) != raw:
        raise corrupt_error(_LABEL, "its header is not as dist_ckpt writes it")
    return documents, header


def _documents(text: str) -> EncodedDocuments:
    start = f'{_START}"{_INDEX}":"'
    if not text.startswith(start):
        raise IncompatibleError(
            f"{_LABEL}: not made by dist_ckpt.to_bytes; open a safetensors file with safetensors, "
            "and a checkpoint's folder with dist_ckpt.open"
        )
    index_text, at = _DECODER.raw_decode(text, len(start) - 1)
    objects = {}
    for key, name in _OBJECTS_FILES.items():
        before = f',"{key}":"'
        stop = text.find('"', at + len(before))
        if not text.startswith(before, at) or stop < 0:
            raise ValueError(f"no {key}")
        if encoded := a2b_base64(text[at + len(before) : stop], strict_mode=True):
            objects[name] = encoded
        at = stop + 1
    index = index_text.encode("utf-8")
    # A few bytes can list a million ranks: check the start before anything is built.
    if not index_text.startswith(_INDEX_START):
        check_version(strict_json.parse(index, f"{_LABEL}, index"), f"{_LABEL}, index")
        raise ValueError("its index is not that of one rank")
    decoded = index_json.decode(index, label=f"{_LABEL}, index")
    assert isinstance(decoded, Index), "its state is committed"
    rest = text[at:].removeprefix(",")
    if not decoded.files:
        if rest != _NO_SHARDS:
            raise ValueError("it has shards that the index does not list")
        return EncodedDocuments(index, objects, b"")
    # If the index has a wrong size, the header's digest detects it.
    room = decoded.files[0].header_nbytes - 8
    inner = f"{_START}{rest}".encode()
    if not len(inner) <= room <= len(inner) + 2 * ALIGNMENT:
        raise ValueError(f"{len(inner)} bytes where the index says {room}")
    return EncodedDocuments(index, objects, room.to_bytes(8, "little") + inner.ljust(room))
