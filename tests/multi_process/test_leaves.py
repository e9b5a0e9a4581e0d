"""Every leaf that ranks can hold a part of, saved by real ranks and loaded by others."""

from __future__ import annotations

import random
import warnings
import zlib
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import Shard as OwnShard
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

import dist_ckpt as dc
from dist_ckpt.core.runtime.torch_private import ShardedTensor, StridedShard, cuts_strided_alike
from ranks import run_ranks
from torch_can import wrap_several_boxes

pytestmark = [pytest.mark.multi_process, pytest.mark.sampled(3)]

WORLD_SIZE = 4

LINE: list[list[Placement]] = [[Replicate()], [Shard(0)], [Shard(1)]]
if cuts_strided_alike():
    LINE += [[StridedShard(0, split_factor=2)], [StridedShard(1, split_factor=3)]]
GRID: list[list[Placement]] = [
    list(pair)
    for pair in product(
        [Replicate(), Shard(0), Shard(1), StridedShard(0, split_factor=2)],
        [Replicate(), Shard(0), Shard(1), StridedShard(0, split_factor=2)],
    )
    if cuts_strided_alike() or not any(isinstance(one, StridedShard) for one in pair)
]
# Even and uneven over four ranks; and such that the last ones have nothing.
SHAPES = [(8, 12), (9, 7), (1, 5), (0, 4)]

Boxes = list[tuple[tuple[int, ...], tuple[int, ...]]]

# The boxes of each rank. No straight cut goes through a pinwheel.
PINWHEEL: list[Boxes] = [
    [((0, 0), (3, 6))],
    [((0, 6), (5, 3))],
    [((5, 3), (2, 6))],
    [((3, 0), (4, 3)), ((3, 3), (2, 3))],
]
COLUMNS: list[Boxes] = [
    [((0, 0), (7, 2))],
    [((0, 2), (3, 7))],
    [((3, 2), (4, 2))],
    [((3, 4), (4, 5))],
]
ROWS: list[Boxes] = [[((3, 0), (1, 9))], [((0, 0), (3, 4))], [((0, 4), (3, 5))], [((4, 0), (3, 9))]]


def full(name: str, *shape: int) -> torch.Tensor:
    """Return the whole tensor of this name: every element another, and another in each tensor."""
    return torch.arange(torch.Size(shape).numel()).view(shape) + 10_000 * zlib.crc32(name.encode())


def box(tensor: torch.Tensor, offset: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
    slices = tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))
    return tensor[slices].clone()


def bits(tensors: Any) -> list[tuple[torch.dtype, torch.Size, bytes]]:
    """Return what tensors hold, for comparing to the last bit."""
    return [
        (
            t.dtype,
            t.shape,
            t.detach().resolve_conj().reshape(-1).view(torch.uint8).numpy().tobytes(),
        )
        for t in ([tensors] if isinstance(tensors, torch.Tensor) else tensors)
    ]


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
        kinds += [("grid", mesh, GRID), ("slow", mesh, GRID[5:][: len(LINE)])]
        kinds.append(("fast", mesh, GRID[-len(LINE) - 1 : -1]))
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
        if bits(tensor.to_local()) != bits(expected[name].to_local())
    ]


def test_dtensors_under_all_placements_load_under_all_others(tmp_path: Path):
    path = str(tmp_path / "c")
    run_ranks(save_distributed, path, world_size=WORLD_SIZE)
    for world_size, shift in [(WORLD_SIZE, 3), (3, 1), (2, 2)]:
        assert run_ranks(load_distributed, path, shift, world_size=world_size) == [[]] * world_size
    state: dict[str, Any] = {}
    dc.load(state, path)
    assert len(state["t"]) == (3 * len(LINE) + len(LINE) + len(GRID)) * len(SHAPES)
    with dc.open(path) as checkpoint:
        for name, tensor in state["t"].items():
            expected = full(name, *tensor.shape)
            assert bits(tensor) == bits(expected)
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


def part(kind: str, boxes: Boxes, whole: torch.Tensor) -> Any:
    """Return what this rank holds of a tensor, as one of the classes that hold parts."""
    shape, rank = tuple(whole.shape), dist.get_rank()
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    tensors = [box(whole, *where) for where in boxes]
    offsets = [offset for offset, _ in boxes]
    held: Any
    match kind:
        case "local":
            held = dc.LocalShard(tensors[0], shape, offsets[0])
        case "flat":
            cuts = [0, 0, 7, 41, 63]  # the first rank has nothing
            flat = whole.view(-1)[cuts[rank] : cuts[rank + 1]]
            held = dc.FlatShard(flat.clone(), shape, cuts[rank])
        case "tiles":
            held = Tiles(shape, boxes, tensors)
        case "wrapper":
            held = LocalShardsWrapper(tensors, offsets)
            size, stride = whole.shape, whole.stride()
            held = DTensor.from_local(
                held, mesh, [Shard(0)], run_check=False, shape=size, stride=stride
            )
        case "dtensor":
            held = distribute_tensor(whole, mesh, [Shard(1)], src_data_rank=None)
        case "sharded":
            shards = [
                OwnShard.from_tensor_and_offsets(tensor, list(offset), rank)
                for tensor, offset in zip(tensors, offsets, strict=True)
            ]
            held = init_from_local_shards(shards, *shape)
        case _:
            held = whole.clone()
    return held


def local_tensors(leaf: Any) -> list[torch.Tensor]:
    match leaf:
        case dc.LocalShard() | dc.FlatShard():
            return [leaf.tensor]
        case Tiles():
            return leaf.tensors
        case ShardedTensor():
            return [shard.tensor for shard in leaf.local_shards()]
        case DTensor():
            local = leaf.to_local()
            return local.local_shards() if isinstance(local, LocalShardsWrapper) else [local]
    return [leaf]


# How each tensor is saved; the others follow in turn for a load.
KINDS = ["local", "flat", "tiles", "wrapper", "sharded", "dtensor", "whole"]
if not wrap_several_boxes():
    KINDS.remove("wrapper")


def parts(shift: int, *, blank: bool) -> dict[str, Any]:
    rank = dist.get_rank()
    made = {}
    for number, name in enumerate(KINDS):
        kind = KINDS[(number + shift) % len(KINDS)]
        tilings = [COLUMNS, ROWS] if kind == "local" else [PINWHEEL, COLUMNS]
        whole = full(name, 7, 9)
        whole = torch.full_like(whole, -1) if blank else whole
        made[name] = part(kind, tilings[shift % 2][rank], whole)
    return made


def save_parts(_rank: int, path: str) -> None:
    dc.save(parts(0, blank=False), path)


def load_parts(_rank: int, path: str, shift: int) -> list[str]:
    state, expected = parts(shift, blank=True), parts(shift, blank=False)
    dc.load(state, path)
    return [
        name
        for name, leaf in state.items()
        if bits(local_tensors(leaf)) != bits(local_tensors(expected[name]))
    ]


def test_every_class_that_holds_parts_loads_into_every_other(tmp_path: Path):
    path = str(tmp_path / "c")
    run_ranks(save_parts, path, world_size=WORLD_SIZE)
    for shift in range(len(KINDS)):
        assert run_ranks(load_parts, path, shift, world_size=WORLD_SIZE) == [[]] * WORLD_SIZE
    with dc.open(path) as checkpoint:
        for name in KINDS:
            assert bytes(checkpoint[name][...].data) == full(name, 7, 9).numpy().tobytes()


# --- whole tensors, and what belongs to some ranks only ------------------------------------------


def whole_tensors() -> dict[str, Any]:
    """Return tensors that all ranks hold, of every kind of memory."""
    base = full("base", 6, 8)
    tied = full("tied", 3)
    tensors = {
        "transposed": base.t(),
        "strided": base[::2, 1::3],
        "scalar": torch.tensor(-0.0),
        "empty": torch.empty(0, 3, dtype=torch.int8),
        "bool": base % 3 == 0,
        "complex": torch.complex(base.float(), -base.float()),
        "conjugate": torch.complex(base.float(), -base.float()).conj(),
        "complex128": torch.complex(base.double(), base.double()),
        "float8": base.view(-1).view(torch.uint8).view(torch.float8_e4m3fn),
        "uint64": base.view(torch.uint64),
        "tied": {"a": tied, "b": tied},
        "parameter": torch.nn.Parameter(base.double()),
        "array": np.arange(5.0),
    }
    return {"whole": tensors}


def blank_like(value: Any) -> Any:
    if isinstance(value, dict):
        copies = {key: blank_like(child) for key, child in value.items()}
        return dict.fromkeys(copies, copies["a"]) if "a" in copies else copies
    return np.zeros_like(value) if isinstance(value, np.ndarray) else torch.zeros_like(value)


def stages(rank: int, names: list[list[int]]) -> dict[str, Any]:
    """Return a pipeline stage: the layers of this rank, which have names of their own."""
    return {f"{n}": {"weight": full(f"layer {n}", 4, n), "extra": n} for n in names[rank]}


SAVED_STAGES = [[0, 1], [2], [], [3, 4, 5]]


def save_own(rank: int, path: str) -> str:
    random.seed(rank)
    torch.manual_seed(rank)
    state = {
        **whole_tensors(),
        "loader": dc.PerRank(
            {"at": rank // 2, "order": torch.arange(rank // 2)}, key=("dp", rank // 2)
        ),
        "mine": dc.PerRank([rank]),
        "sum": dc.PerRank(rank + 1),
        "rng": dc.RNG(),
    }
    if layers := stages(rank, SAVED_STAGES):
        state["layers"] = layers
    dc.save(state, path)
    return f"{random.random()} {torch.rand(1).item()}"


def total(values: Mapping[Any, Any], _: object) -> int:
    return sum(values.values())


def load_own(rank: int, path: str, names: list[list[int]]) -> Any:
    world_size = dist.get_world_size()
    expected = whole_tensors()["whole"]
    layers = stages(rank, names)
    on_reshard: Literal["error", "drop"] = "error" if world_size == WORLD_SIZE else "drop"
    # Keys are shared by all ranks that are alike; fewer ranks may have the same keys.
    key = ("dp", rank * 2 // world_size)
    state: dict[str, Any] = {
        "whole": blank_like(expected),
        "layers": {n: {"weight": blank_like(v["weight"]), "extra": -1} for n, v in layers.items()},
        "loader": dc.PerRank({}, key=key),
        "mine": dc.PerRank([-1], on_reshard=on_reshard),
        "sum": dc.PerRank(0, on_reshard=total),
        "rng": dc.RNG(on_reshard=on_reshard),
    }
    report = dc.load(state, path)
    for name, tensor in expected.items():
        found = state["whole"][name]
        if name == "tied":
            assert found["a"] is found["b"]
        as_list = [*found.values()] if name == "tied" else [torch.as_tensor(found)]
        assert bits(as_list) == bits(
            [*tensor.values()] if name == "tied" else [torch.as_tensor(tensor)]
        )
    for n, layer in layers.items():
        assert bits(state["layers"][n]["weight"]) == bits(layer["weight"])
        assert state["layers"][n]["extra"] == layer["extra"]
    loader = state["loader"].value
    assert (loader["at"], loader["order"].tolist()) == (key[1], list(range(key[1])))
    drawn = f"{random.random()} {torch.rand(1).item()}"
    return drawn, state["mine"].value, state["sum"].value, sorted(report.dropped)


def refuse_own(rank: int, path: str) -> str:
    state = {"mine": dc.PerRank([-1]), "rng": dc.RNG()}
    before = random.getstate()
    with pytest.raises(dc.IncompatibleError, match="on_reshard") as raised:
        dc.load(state, path, include=["mine", "rng"])
    assert random.getstate() == before
    return str(raised.value)


def test_what_belongs_to_some_ranks_comes_back_to_them(tmp_path: Path):
    path = str(tmp_path / "c")
    drawn = run_ranks(save_own, path, world_size=WORLD_SIZE)
    assert len(set(drawn)) == WORLD_SIZE
    # Other stages have the layers now; the generators are whose they were.
    others = [[5, 0], [4], [3, 2], [1]]
    assert run_ranks(load_own, path, others, world_size=WORLD_SIZE) == [
        (drawn[rank], [rank], rank + 1, []) for rank in range(WORLD_SIZE)
    ]
    halves = [[0, 2, 4], [1, 3, 5]]
    for _, mine, added, dropped in run_ranks(load_own, path, halves, world_size=2):
        assert (mine, added, dropped) == ([-1], 10, ["mine", "rng"])
    for message in run_ranks(refuse_own, path, world_size=2):
        assert "mine" in message
        assert "rng" in message
    with dc.open(path) as checkpoint:
        assert checkpoint.per_rank["mine"] == {rank: [rank] for rank in range(WORLD_SIZE)}
        assert set(checkpoint.per_rank["loader"]) == {("dp", 0), ("dp", 1)}
        for n in range(6):
            expected = full(f"layer {n}", 4, n).numpy().tobytes()
            assert bytes(checkpoint[f"layers.{n}.weight"][...].data) == expected


def _saved_and_loaded(rank: int, path: str) -> list[list[float]]:
    tensors = [torch.ones(2), torch.ones(1)]
    own: dict[str, Any] = (
        {"a": {"b.c": tensors[0], "x": 1}}
        if rank == 0
        else {"a": {"b": {"c": tensors[0], "d": tensors[1]}}}
    )
    dc.save(own, path)
    for tensor in tensors:
        tensor.zero_()
    dc.load(own, path)
    return [tensor.tolist() for tensor in tensors]


def test_ranks_may_cut_one_name_at_other_dots(tmp_path: Path) -> None:
    found = run_ranks(_saved_and_loaded, f"{tmp_path}/ck", world_size=2)
    assert found == [[[1.0, 1.0], [0.0]], [[1.0, 1.0], [1.0]]]
    assert dc.verify(tmp_path / "ck").ok
