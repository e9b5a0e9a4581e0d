"""What a thread does in a row is much at first, and little at the end."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from itertools import chain

import pytest

from dist_ckpt.core.format.geometry import Region
from dist_ckpt.core.planning.plan import TensorRequest
from dist_ckpt.core.shard_io.read import read_grouping
from dist_ckpt.core.shard_io.read.open_files import open_files
from dist_ckpt.core.shard_io.read.read_grouping import BlockRead, split_into_work
from dist_ckpt.testing.memory_storage import MemoryStorage
from written import Saved, one_cell, plan_of, random_tensor, write

FOLDER = "/ck"
BLOCK_NBYTES = 64


def spans_of(
    saved: Mapping[str, Saved], monkeypatch: pytest.MonkeyPatch, *, threads: int
) -> list[list[tuple[str, int, int]]]:
    """Return the file and span of each read, those that a thread does in a row together."""
    monkeypatch.setattr(read_grouping, "READ_NBYTES", BLOCK_NBYTES)
    storage = MemoryStorage({FOLDER: None})
    index = write(storage, FOLDER, saved, block_nbytes=BLOCK_NBYTES)
    wanted = [
        TensorRequest(fqn, one.dtype, one.shape, (Region.whole(one.shape),))
        for fqn, one in saved.items()
    ]
    plan = plan_of(index, wanted)
    with closing(open_files(storage, FOLDER, index, plan, threads=1)) as files:
        work = list(split_into_work(files, None, threads))
    assert all(isinstance(one, BlockRead) for _, one in chain.from_iterable(work))
    return [[(file.path, one.span.start, one.span.stop) for file, one in some] for some in work]


def test_a_thread_does_many_reads_at_first_and_one_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(read_grouping, "WORK_NBYTES", 8 * BLOCK_NBYTES)
    saved = {
        f"model.t{number}": random_tensor((1024,), one_cell((1024,)), seed=number)
        for number in range(2)
    }
    work = spans_of(saved, monkeypatch, threads=2)
    spans = list(chain.from_iterable(work))
    assert [stop for _, _, stop in spans[:-1]] == [start for _, start, _ in spans[1:]]
    assert (spans[0][1], spans[-1][2]) == (0, 8192)
    counts = [len(some) for some in work]
    assert counts[:5] == [8] * 5
    assert counts[-4:] == [1] * 4
    assert counts == sorted(counts, reverse=True)


@pytest.mark.parametrize("threads", [1, 4])
def test_a_small_load_is_shared_by_all_threads(
    monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    saved = {"model.t": random_tensor((256,), one_cell((256,)))}
    work = spans_of(saved, monkeypatch, threads=threads)
    assert len(work) > threads
    assert max(len(some) for some in work) <= 16 // (2 * threads)
