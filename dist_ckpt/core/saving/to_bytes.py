"""`dc.to_bytes`: the whole state of one rank as bytes. Their format: `format/state_bytes.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from io import BytesIO
from math import prod

from msgspec.structs import replace

from dist_ckpt.core.comm.process_group import job_ranks_own_first
from dist_ckpt.core.commit.receipts import build_file_tables
from dist_ckpt.core.format.checksums import BLOCK_DIGEST_CHARS, Buffer, document_digest
from dist_ckpt.core.format.index import index_json
from dist_ckpt.core.format.index.index import Index
from dist_ckpt.core.format.state_bytes import ATTEMPT, COMPONENT, EncodedDocuments, encode_documents
from dist_ckpt.core.planning.plan import FilePlan, FileReceipt, Inventory, Receipt, SavePlan
from dist_ckpt.core.planning.save.save_planner import plan_rank_files, plan_save
from dist_ckpt.core.planning.tensor_views import Whole, compute_cells
from dist_ckpt.core.runtime.processes import paused_collector
from dist_ckpt.core.saving.rank_save import encode_objects_files
from dist_ckpt.core.shard_io.write.shard_writer import RankFiles, ReaderOf, write_rank_files
from dist_ckpt.core.state.inventory_builder import LocalState, build_inventory
from dist_ckpt.core.state.tree.containers import State
from dist_ckpt.message_text import names_around_remedy


def to_bytes(state: State) -> bytes:
    """Return this rank's whole state as bytes, for tests, for transfer, or to embed in a program.

    The state is as for `dc.save`: modules, optimizers, tensors, plain values. The bytes have
    checksums, and depend only on the state. `dc.from_bytes` and `dc.load_bytes` read them. They
    are also a valid safetensors file, so other libraries can read the tensors by name.

    Not collective: each rank gets separate bytes. In them a `PerRank` without a key belongs to rank
    0. Raises ValueError, with their names, for tensors that are sharded over several ranks. Raises
    ValueError or TypeError for a state that cannot be saved. The bytes are in memory only once.
    """
    group = job_ranks_own_first()
    with paused_collector():
        local = build_inventory(
            state, sharding=None, rank=0, world_size=len(group), group_ranks=group
        )
        plan = plan_save([(_single_rank_inventory(local.inventory), (0,))], 1)
    local.synchronize()
    files, objects = plan_rank_files(plan, 0), encode_objects_files(plan, local, 0, {})
    # The length of the header does not depend on the data. So compute it first, with blank digests.
    blank = {}
    for file in files:
        digests = "0" * (file.header.num_digests * BLOCK_DIGEST_CHARS)
        blank[file.name] = file.header.fill(None, digests)
    start = len(_encode_header(plan, files, objects, blank))
    with BytesIO() as out:
        nbytes = start + sum(file.nbytes - file.header.nbytes for file in files)
        out.seek(nbytes - 1)
        out.write(b"\0")
        writer = _DataWriter(out, start, {file.name: file for file in files})
        content = RankFiles(None, files, tuple(_find_readers(local, file) for file in files), {})
        write_rank_files(writer, "", content, threads=1)
        header = _encode_header(plan, files, objects, writer.headers)
        assert len(header) == start, "no digest changes the length of the header"
        out.seek(0)
        out.write(header)
        return out.getvalue()


def _single_rank_inventory(inventory: Inventory) -> Inventory:
    """Return the inventory of a job with only this rank. ValueError for sharded tensors."""
    sharded = []
    for entry in inventory.tensors:
        cells = compute_cells(inventory.views[entry.view], 0, entry.shape)
        if (cells[0].numel if len(cells) == 1 else 0) != prod(entry.shape):
            sharded.append(entry.fqn)
    if sharded:
        text, rest = names_around_remedy(sharded)
        raise ValueError(
            f"{text}: this rank has only a part of it, and the bytes of a state are one "
            "rank's whole state. Use dist_ckpt.save, or gather it first: a DTensor by "
            "full_tensor(), a model by torch.distributed.checkpoint.state_dict with full_state_dict"
            f"{rest}"
        )
    return replace(
        inventory,
        mesh=(),
        components=(COMPONENT,) if inventory.tensors else (),
        views=(Whole(),) if inventory.tensors else (),
        tensors=tuple(replace(entry, view=0, component=0) for entry in inventory.tensors),
    )


def _find_readers(local: LocalState, file: FilePlan) -> ReaderOf:
    return lambda number: local.reader(file.items[number].fqn, 0)


def _encode_header(
    plan: SavePlan,
    files: tuple[FilePlan, ...],
    objects: dict[str, bytes],
    headers: dict[str, bytes],
) -> bytes:
    """Return the bytes before the data. `headers` has the header of each shard file by name."""
    receipts = [
        FileReceipt(file.name, file.nbytes, file.header.nbytes, document_digest(headers[file.name]))
        for file in files
    ]
    receipts += [
        FileReceipt(name, len(data), 0, document_digest(data)) for name, data in objects.items()
    ]
    shard_files, objects_records = build_file_tables(
        plan.catalog, [Receipt(tuple(receipts), (), 0.0)]
    )
    index = Index(
        attempt=ATTEMPT,
        step=None,
        catalog=plan.catalog,
        files=shard_files,
        objects=objects_records,
        metadata={},
        saved_by={},
        saved_at=0.0,
    )
    header = b"".join(headers[file.name] for file in files)
    return encode_documents(EncodedDocuments(index_json.encode(index), objects, header))


@dataclass(slots=True)
class _DataWriter:
    """A storage for the shard file. Writes the data to `out`, and the header to `headers`."""

    out: BytesIO
    start: int
    files: Mapping[str, FilePlan]
    alignment: int = 1
    headers: dict[str, bytes] = field(default_factory=dict)
    _name: str = ""
    _nbytes: int = 0

    def create(self, path: str, nbytes: int) -> _DataWriter:
        """Return this object as the file: there is only one file."""
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
        """Do nothing: after an error the caller drops `out`."""

    def sync(self, folder: str) -> None:
        """Do nothing: memory needs no sync."""
