"""Every leaf that ranks can hold a part of, saved by real ranks and loaded by others."""

from __future__ import annotations

import random
import warnings
import zlib
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch.distributed._shard.sharded_tensor import Shard as OwnShard
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

import dist_ckpt as dc
from dist_ckpt.torch_private import ShardedTensor, StridedShard

pytestmark = pytest.mark.multi_process

WORLD_SIZE = 4

LINE = [
    [Replicate()],
    [Shard(0)],
    [Shard(1)],
    [StridedShard(0, split_factor=2)],
    [StridedShard(1, split_factor=3)],
]
GRID = [
    list(pair)
    for pair in product(
        [Replicate(), Shard(0), Shard(1), StridedShard(0, split_factor=2)],
        [Replicate(), Shard(0), Shard(1), StridedShard(0, split_factor=2)],
    )
]
# Even and uneven over four ranks; and such that the last ones have nothing.
SHAPES = [(8, 12), (9, 7), (3, 2), (1, 5), (0, 4)]

# A pinwheel: no straight cut through it. The last rank holds two of its boxes.
PINWHEEL = [
    [((0, 0), (3, 6))],
    [((0, 6), (5, 3))],
    [((5, 3), (2, 6))],
    [((3, 0), (4, 3)), ((3, 3), (2, 3))],
]
COLUMNS = [
    [((0, 0), (7, 2))],
    [((0, 2), (3, 7))],
    [((3, 2), (4, 2))],
    [((3, 4), (4, 5))],
]
Boxes = list[tuple[tuple[int, int], tuple[int, int]]]


def full(name: str, *shape: int) -> torch.Tensor:
    """Return the whole tensor of this name: every element another, and another in each tensor."""
    return torch.arange(torch.Size(shape).numel()).view(shape) + 10_000 * zlib.crc32(name.encode())


def box(tensor: torch.Tensor, offset: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
    slices = tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))
    return tensor[slices].clone()


def is_same(a: Any, b: Any) -> bool:
    return bool(
        a.dtype == b.dtype
        and a.shape == b.shape
        and a.contiguous().view(torch.uint8).equal(b.contiguous().view(torch.uint8))
        if isinstance(a, torch.Tensor)
        else type(a) is type(b) and a == b
    )


# --- DTensor -------------------------------------------------------------------------------------


def distributed(shift: int, *, blank: bool) -> dict[str, DTensor]:
    """Return DTensors under every placement, `shift` further on in the list, on this rank."""
    world_size = dist.get_world_size()
    kinds: list[tuple[str, DeviceMesh, list[list[Placement]]]] = [
        ("line", init_device_mesh("cpu", (world_size,)), LINE)
    ]
    if world_size == WORLD_SIZE:
        grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        kinds += [("grid", grid, GRID), ("slow", grid["a"], LINE), ("fast", grid["b"], LINE)]
        kinds.append(("part", DeviceMesh("cpu", [3, 1]), LINE))
    else:
        mesh = init_device_mesh("cpu", (1, world_size))
        kinds += [("grid", mesh, GRID), ("slow", mesh, GRID[5:10]), ("fast", mesh, GRID[10:15])]
        kinds.append(("part", DeviceMesh("cpu", [world_size - 1]), LINE))
    tensors = {}
    for kind, mesh, placements in kinds:
        for (number, _), shape in product(enumerate(placements), SHAPES):
            name = f"{kind} {number} {shape}"
            value = full(name, *shape)
            placed = placements[(number + shift) % len(placements)]
            tensor = distribute_tensor(
                torch.full_like(value, -1) if blank else value, mesh, placed, src_data_rank=None
            )
            tensors[name] = tensor
    return tensors


def save_distributed(_rank: int, path: str) -> None:
    warnings.simplefilter("ignore")
    dc.save({"t": distributed(0, blank=False)}, path)


def load_distributed(_rank: int, path: str, shift: int) -> list[str]:
    """Return the names of what is wrong."""
    warnings.simplefilter("ignore")
    state = {"t": distributed(shift, blank=True)}
    dc.load(state, path)
    expected = distributed(shift, blank=False)
    return [
        name
        for name, tensor in state["t"].items()
        if not is_same(tensor.to_local(), expected[name].to_local())
    ]


def test_dtensors_under_all_placements_load_under_all_others(tmp_path: Path):
    path = str(tmp_path / "c")
    run_ranks(WORLD_SIZE, save_distributed, path)
    for world_size, shift in [(WORLD_SIZE, 0), (WORLD_SIZE, 3), (3, 1), (2, 2)]:
        assert run_ranks(world_size, load_distributed, path, shift) == [[]] * world_size
    state: dict[str, Any] = {}
    dc.load(state, path)
    assert len(state["t"]) == (3 * len(LINE) + len(LINE) + len(GRID)) * len(SHAPES)
    with dc.open(path) as checkpoint:
        for name, tensor in state["t"].items():
            expected = full(name, *tensor.shape)
            assert is_same(tensor, expected)
            assert bytes(checkpoint[f"t.{name}"][...].data) == expected.numpy().tobytes()


# --- local parts ---------------------------------------------------------------------------------


class Tiles:
    """A third party's class: boxes of a tensor, which it tells torch's own checkpoints too."""

    dtype = torch.int64

    def __init__(self, shape: tuple[int, ...], boxes: Boxes, tensors: list[torch.Tensor]) -> None:
        self.shape = shape
        self.boxes = boxes
        self.tensors = tensors

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for o, s in self.boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        at = [offset for offset, _ in self.boxes].index(tuple(index.offset or ()))
        return self.tensors[at]


def parts(tiling: list[Boxes], rank: int, *, blank: bool) -> dict[str, Any]:
    """Return one tensor as each of the classes that hold parts."""

    def held(name: str) -> list[torch.Tensor]:
        whole = full(name, 7, 9)
        whole = torch.full_like(whole, -1) if blank else whole
        return [box(whole, *where) for where in tiling[rank]]

    boxes = tiling[rank]
    first = rank * rank * 7  # uneven
    flat = full("flat", 7, 9).view(-1)[first : (rank + 1) ** 2 * 7 if rank < 3 else 63]
    wrapper = LocalShardsWrapper(held("wrapper"), [offset for offset, _ in boxes])
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    shards = [
        OwnShard.from_tensor_and_offsets(tensor, list(offset), rank)
        for tensor, (offset, _) in zip(held("sharded"), boxes, strict=True)
    ]
    last = len(boxes) - 1
    whole_of_last = [full("local", 7, 9)] if blank else held("local")
    return {
        "flat": dc.FlatShard(torch.full_like(flat, -1) if blank else flat, (7, 9), first),
        "tiles": Tiles((7, 9), boxes, held("tiles")),
        "wrapper": DTensor.from_local(
            wrapper, mesh, [Shard(0)], run_check=False, shape=torch.Size((7, 9)), stride=(9, 1)
        ),
        "sharded": init_from_local_shards(shards, 7, 9),
        "local": dc.LocalShard(held("local")[last], (7, 9), boxes[last][0])
        if last == 0
        else dc.LocalShard(whole_of_last[0], (7, 9), (0, 0)),
    }
