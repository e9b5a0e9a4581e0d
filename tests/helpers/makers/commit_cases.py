"""Small checkpoints for the tests of the commit: what ranks write, and whether it is all there."""

from __future__ import annotations

from collections.abc import Sequence

from dist_ckpt.core.commit import commit_protocol, removal
from dist_ckpt.core.commit.attempts import find_checkpoint
from dist_ckpt.core.format import filenames
from dist_ckpt.core.format.geometry import Grid, Layout
from dist_ckpt.core.format.index.index import (
    Catalog,
    Component,
    Index,
    ObjectsFileRecord,
    ShardFileRecord,
    TensorRecord,
)
from dist_ckpt.core.storage import Storage
from dist_ckpt.errors import NotFoundError
from dist_ckpt.testing.memory_storage import MemoryStorage

HEADER_NBYTES = 4096
PATH = "/runs/ck"


def content(step: int, rank: int) -> bytes:
    """Return a rank's shard file: a header and four floats, the same for a step and rank."""
    return f"{step:3} {rank:3} ".encode() * (HEADER_NBYTES // 8) + bytes([step % 256]) * 16


def objects(step: int) -> bytes:
    return f"objects of {step}".encode()


def index_of(attempt: filenames.Attempt, step: int, ranks: int) -> Index:
    """Return the index of a checkpoint of one tensor whose rows are spread over the ranks."""
    layout = Layout(Grid((tuple(range(ranks + 1)), (0, 4))), tuple((r,) for r in range(ranks)))
    return Index(
        attempt=attempt.name,
        step=step,
        catalog=Catalog(
            world_size=ranks,
            mesh=(),
            components=(Component("model", "model"),),
            layouts=(layout,),
            tensors={"model.w": TensorRecord("float32", (ranks, 4), 0, 0, 0)},
            aliases={},
            values={},
            per_rank={},
        ),
        files=tuple(
            ShardFileRecord(0, rank, len(content(step, rank)), HEADER_NBYTES, "0" * 32)
            for rank in range(ranks)
        ),
        objects=(ObjectsFileRecord(filenames.OBJECTS, len(objects(step)), "0" * 32),),
        metadata={},
        saved_by={"dist_ckpt": "0.1.0"},
        saved_at=1.5,
    )


def sizes_of(step: int, ranks: int) -> dict[str, int]:
    names = {filenames.shard_file("model", rank): len(content(step, rank)) for rank in range(ranks)}
    return {**names, filenames.OBJECTS: len(objects(step))}


def write_rank(storage: Storage, folder: str, step: int, rank: int) -> None:
    """Write what one rank writes: the data first, its header last, then make both durable."""
    data = content(step, rank)
    file = storage.create(f"{folder}/{filenames.shard_file('model', rank)}", len(data))
    file.write_at(HEADER_NBYTES, data[HEADER_NBYTES:])
    file.write_at(0, data[:HEADER_NBYTES])
    file.finish()
    if rank == 0:
        file = storage.create(f"{folder}/{filenames.OBJECTS}", len(objects(step)))
        file.write_at(0, objects(step))
        file.finish()
    storage.sync(folder)


def save(
    storage: Storage, step: int, *, path: str = PATH, ranks: int = 1, overwrite: bool = False
) -> filenames.Attempt:
    """Save as one process: claim, write, check, commit, supersede."""
    claim = commit_protocol.claim(storage, path, overwrite=overwrite, by=f"the saver of {step}")
    for rank in range(ranks):
        write_rank(storage, claim.folder, step, rank)
    commit_protocol.check_files(storage, claim.folder, sizes_of(step, ranks))
    commit_protocol.commit(storage, claim, index_of(claim.attempt, step, ranks))
    removal.remove_superseded(storage, path, claim.attempt)
    return claim.attempt


def read(storage: Storage, file: str) -> bytes:
    reader = storage.open(file)
    data = bytearray(reader.nbytes)
    reader.read_into(0, memoryview(data))
    reader.close()
    return bytes(data)


def step_at(storage: Storage, path: str = PATH) -> int | None:
    """Return the step of the checkpoint, after checking that every byte of it is there."""
    try:
        attempt, index = find_checkpoint(storage, path)
    except NotFoundError:
        return None
    assert index.step is not None
    folder = f"{path}/{attempt}"
    for file in index.files:
        name = filenames.shard_file("model", file.rank)
        assert read(storage, f"{folder}/{name}") == content(index.step, file.rank), name
    assert read(storage, f"{folder}/{filenames.OBJECTS}") == objects(index.step)
    return index.step


def names_in(storage: Storage, folder: str = PATH) -> Sequence[str]:
    return [entry.name for entry in storage.list(folder)]


def with_root() -> MemoryStorage:
    return MemoryStorage({"/runs": None})
