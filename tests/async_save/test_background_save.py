"""Staging: what lies in the arena is what `dc.save` would write, but for the headers."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import dist_ckpt as dc
from dist_ckpt.async_save.snapshots.arena import Arena, ArenaReader
from dist_ckpt.async_save.snapshots.arena_layout import Snapshot, arena_nbytes
from dist_ckpt.async_save.trainer.background_save import list_images, stage
from dist_ckpt.core.comm.collectives.collective import SingleProcessCollective
from dist_ckpt.core.comm.exchange.channel import SingleProcessChannel
from dist_ckpt.core.comm.session import Session
from dist_ckpt.core.runtime.host_memory import create_named
from dist_ckpt.core.saving.agreement import plan_together
from dist_ckpt.core.saving.rank_save import RankSave
from dist_ckpt.core.shard_io.write.shard_writer import RankFiles

JOB = "a job"
ID = "0123456789abcdef" * 2


def state() -> dict[str, Any]:
    """Return tensors of every kind of source: large, small, empty, strided, of odd types."""
    torch.manual_seed(0)
    large = torch.randn(3_000_000)
    return {
        "large": large,
        "rows": torch.randn(2000, 700).t(),
        "small": [torch.randn(n) for n in range(40)],
        "odd": {
            "conj": torch.randn(5000, dtype=torch.complex64).conj(),
            "bool": torch.rand(33) > 0.5,
            "bfloat": torch.randn(9).bfloat16(),
            "empty": torch.empty(0, 3),
            "tied": large,
        },
        "plain": {"step": 3, "text": "a"},
    }


def files_of(state: dict[str, Any]) -> RankFiles:
    session = Session(SingleProcessChannel(), SingleProcessCollective())
    held = RankSave.read(session, state, None)
    return held.files(plan_together(session, held.inventory).save_plan, 1, {}, {})


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Arena]:
    path = f"{tmp_path}/arena"
    arena = Arena(path, create_named(path, 1 << 20), JOB)
    yield arena
    arena.close()


def staged(arena: Arena, files: RankFiles) -> dict[str, bytes]:
    """Stage files and return them as a writer sees them."""
    snapshot = Snapshot(ID, "/a", 1, 0, 1, list_images(files))
    arena.reserve(arena_nbytes(snapshot))
    stage(arena, arena.begin(snapshot), files)
    follower = ArenaReader(arena.path, JOB)
    followed = follower.follow(ID)
    assert followed.is_complete
    found = {
        image.name: bytes(memory)
        for image, memory in zip(snapshot.images, followed.images, strict=True)
    }
    follower.close()
    return found


def test_what_is_staged_is_what_is_saved(arena: Arena, tmp_path: Path) -> None:
    saved, files = state(), files_of(state())
    found = staged(arena, files)
    report = dc.save(saved, tmp_path / "ck", step=1)
    folder = tmp_path / "ck" / report.attempt
    names = {plan.name: plan.header.nbytes for plan in files.plans}
    for name, data in found.items():
        there = (folder / name).read_bytes()
        assert len(data) == len(there)
        assert data[names.get(name, 0) :] == there[names.get(name, 0) :]
    assert sorted([*found, "claim.json", "index.json"]) == sorted(os.listdir(folder))


def test_what_was_staged_before_is_overwritten(arena: Arena) -> None:
    first = staged(arena, files_of({"w": torch.full((5000,), 1.0)}))
    second = staged(arena, files_of({"w": torch.full((5000,), 2.0)}))
    (name,) = [name for name in first if name.endswith("safetensors")]
    assert torch.frombuffer(bytearray(first[name][-20_000:]), dtype=torch.float32).unique() == 1
    assert torch.frombuffer(bytearray(second[name][-20_000:]), dtype=torch.float32).unique() == 2


class Slow:
    """A source that is not read before it may be."""

    def __init__(self, inner: Any, may: threading.Event) -> None:
        self._inner, self._may = inner, may
        self.nbytes = inner.nbytes

    def address(self) -> int | None:
        return None

    def read(self, start: int, stop: int, scratch: memoryview) -> memoryview:
        assert self._may.wait(30)
        data: memoryview = self._inner.read(start, stop, scratch)
        return data


def test_a_writer_is_told_only_of_what_is_staged_without_a_gap(arena: Arena) -> None:
    """The first file is held up while the second is copied by another thread."""
    files = files_of({"a": {"w": torch.ones(100)}, "b": {"w": torch.ones(100)}})
    assert len(files.plans) == 2
    may, seen = threading.Event(), []
    first, second = files.readers

    def read_second(number: int) -> Any:
        seen.append(ArenaReader(arena.path, JOB).follow(ID).ready)
        may.set()
        return second(number)

    def read_first(number: int) -> Any:
        return Slow(first(number), may)

    held_up = replace(files, readers=(read_first, read_second))
    staged(arena, held_up)
    assert seen == [0]


def test_a_tensor_that_has_changed_its_size_is_named_and_nothing_is_complete(arena: Arena) -> None:
    tensor = torch.ones(10)
    files = files_of({"v": torch.ones(10), "w": tensor})
    tensor.resize_(20)
    with pytest.raises(ValueError, match="w: 40 bytes when the save began, and 80 now"):
        staged(arena, files)
    assert not ArenaReader(arena.path, JOB).follow(ID).is_complete
