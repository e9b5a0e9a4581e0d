"""Small checkpoints of several ranks' files, by real saves of ranks that are threads.

Their blocks are small, so that a tensor of some KiB has many.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

import dist_ckpt as dc
from dist_ckpt.core.planning.save import save_planner
from dist_ckpt.core.storage import ReadableFile, Storage
from ranks import save_on_threads

RANKS = 4


class Boxes:
    """Several boxes of a tensor, as a class outside offers them: rows `numbers` of `whole`."""

    def __init__(self, whole: torch.Tensor, numbers: Sequence[int]) -> None:
        self.whole = whole
        self.numbers = numbers
        self.shape = whole.shape
        self.dtype = whole.dtype
        self.rows = [whole[number : number + 1].clone() for number in numbers]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(torch.Size((number, 0)), row.shape)
            for number, row in zip(self.numbers, self.rows, strict=True)
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        assert index.index is not None
        return self.rows[index.index]


@contextmanager
def blocks_of(nbytes: int) -> Iterator[None]:
    """Let a checksum cover `nbytes` bytes in what is saved meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(save_planner, "BLOCK_NBYTES", nbytes)
        yield


def random_tensors() -> dict[str, torch.Tensor]:
    """Return the whole tensors of the damaged checkpoint, by name."""
    make = torch.Generator().manual_seed(7)
    return {
        "model.w": torch.randn(40, 8, generator=make),
        "model.strided": torch.randn(9, 4, generator=make),
        "model.flat": torch.randn(6, 5, generator=make, dtype=torch.float64),
        "model.bias": torch.randn(11, generator=make).to(torch.bfloat16),
        "model.scalar": torch.randn((), generator=make),
        "model.empty": torch.empty(0, 3),
        "optim.moment": torch.randn(40, 8, generator=make),
    }


# Rank 2 has no rows of these; the others uneven numbers.
CUTS = (0, 13, 20, 20, 40)


def rank_state(rank: int) -> dict[str, Any]:
    """Return a rank's state: uneven, strided, flat, replicated and tied tensors, and values."""
    whole = random_tensors()
    rows = slice(CUTS[rank], CUTS[rank + 1])
    flat = whole["model.flat"].flatten()[(0, 7, 15, 22)[rank] : (7, 15, 22, 30)[rank]].clone()
    bias = whole["model.bias"]

    def part(name: str) -> dc.LocalShard:
        return dc.LocalShard(whole[name][rows].clone(), (40, 8), (rows.start, 0))

    return {
        "model": {
            "w": part("model.w"),
            "strided": Boxes(whole["model.strided"], range(rank, 9, RANKS)),
            "flat": dc.FlatShard(flat, (6, 5), (0, 7, 15, 22)[rank]),
            "bias": bias,
            "tied": bias,
            "scalar": whole["model.scalar"],
            "empty": whole["model.empty"],
        },
        "optim": {"moment": part("optim.moment")},
        "epoch": {"number": 3, "name": "third"},
        "seen": dc.PerRank([rank] * 3, on_reshard="drop"),
        **({"late": [1, 2, 3]} if rank == 3 else {}),
    }


def save_small(storage: Storage, path: str, **options: Any) -> None:
    """Save the states of all ranks, in blocks of two rows of `model.w`."""
    states = [rank_state(rank) for rank in range(RANKS)]
    with blocks_of(64):
        save_on_threads(storage, states, path, step=5, **options)


class Counting:
    """Counts the bytes that are read of each file, but for what is read from its start on."""

    def __init__(self, inner: Storage) -> None:
        self._inner = inner
        self._reads: list[tuple[str, int]] = []  # threads may add to it
        self.opened: list[str] = []

    @property
    def nbytes(self) -> dict[str, int]:
        """The bytes so far, by the name of the file."""
        found: dict[str, int] = {}
        for name, count in self._reads:
            found[name] = found.get(name, 0) + count
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def open(self, path: str) -> ReadableFile:
        """Open a file whose reads are counted."""
        name = path.rpartition("/")[2]
        self.opened.append(name)
        return _CountingFile(self._inner.open(path), self._reads, name)


class _CountingFile:
    def __init__(self, inner: ReadableFile, reads: list[tuple[str, int]], name: str) -> None:
        self._inner = inner
        self._reads = reads
        self._name = name

    @property
    def nbytes(self) -> int:
        return self._inner.nbytes

    @property
    def num_links(self) -> int:
        return self._inner.num_links

    def read_into(self, offset: int, target: memoryview) -> int:
        count = self._inner.read_into(offset, target)
        if offset:
            self._reads.append((self._name, count))
        return count

    def close(self) -> None:
        self._inner.close()


def values_equal(found: Mapping[str, Any], whole: Mapping[str, torch.Tensor]) -> bool:
    """Say whether a nested mapping holds these tensors, bit for bit."""
    for fqn, tensor in whole.items():
        value: Any = found
        for key in fqn.split("."):
            value = value[key]
        if value.dtype != tensor.dtype or not torch.equal(value, tensor):
            return False
    return True
