"""What DCP's tests check of sharded tensors on four ranks: functions of a way and a folder."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor, ShardMetadata
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

import dist_ckpt as dc
from dcp_scenarios_alone import Kept
from dcp_ways import State, Way, error_of, meet, rank, same
from dist_ckpt.interop.hf.export import export_folder

WHOLE = torch.arange(200.0).view(10, 20)


def chunked(dim: int, *ranks: int) -> ChunkShardingSpec:
    return ChunkShardingSpec(dim=dim, placements=[f"rank:{number}/cpu" for number in ranks])


def listed(*parts: tuple[int, int], ndim: int = 1) -> EnumerableShardingSpec:
    """Return a spec of row ranges: so many rows for such a rank, one after the other."""
    shards, at = [], 0
    for rows, number in parts:
        more = [20] * (ndim - 1)
        offset = [at, *(0 for _ in more)]
        shards.append(ShardMetadata(offset, [rows, *more], placement=f"rank:{number}/cpu"))
        at += rows
    return EnumerableShardingSpec(shards)


def filled(spec: Any, whole: torch.Tensor) -> ShardedTensor:
    """Return a ShardedTensor that holds the values of a whole one."""
    made = sharded_tensor.zeros(spec, *whole.shape)
    for shard in made.local_shards():
        box = shard.metadata
        ends = zip(box.shard_offsets, box.shard_sizes, strict=True)
        shard.tensor.copy_(whole[tuple(slice(a, a + n) for a, n in ends)])
    return made


def holds(tensor: Any, whole: torch.Tensor) -> bool:
    expected = filled(tensor.sharding_spec(), whole)
    pairs = zip(tensor.local_shards(), expected.local_shards(), strict=True)
    return all(torch.equal(one.tensor, other.tensor) for one, other in pairs)


def goes_into(way: Way, path: str, saved: Any, loaded: Any, whole: torch.Tensor = WHOLE) -> None:
    way.save({"st": filled(saved, whole)}, path)
    state = {"st": sharded_tensor.zeros(loaded, *whole.shape)}
    way.load(state, path)
    assert holds(state["st"], whole)


# --- test_file_system_checkpoint_cpu.py --------------------------------------------------------


def sharded_tensor_as_it_was(way: Way, path: str) -> None:
    goes_into(way, f"{path}/a", chunked(0, 0, 1, 2, 3), chunked(0, 0, 1, 2, 3))


PLANS = (
    chunked(0, 0, 1, 2, 3),
    chunked(0, 0, 1, 1, 0),
    listed((2, 0), (1, 1), (3, 0), (3, 1), (1, 0), ndim=2),
    listed((8, 1), (2, 0), ndim=2),
)


def other_plans_of_shards(way: Way, path: str) -> None:
    for number, saved in enumerate(PLANS):
        way.save({"st": filled(saved, WHOLE)}, f"{path}/{number}")
        state = {
            f"{other}": sharded_tensor.zeros(loaded, 10, 20) for other, loaded in enumerate(PLANS)
        }
        for tensor in state.values():
            way.load({"st": tensor}, f"{path}/{number}")
            assert holds(tensor, WHOLE)


def rows_to_columns(way: Way, path: str) -> None:
    goes_into(way, f"{path}/a", chunked(0, 0, 1, 2, 3), chunked(1, 0, 1, 2, 3))
    goes_into(way, f"{path}/b", chunked(1, 3, 2), chunked(0, 1, 2))


def values_that_are_no_tensors(way: Way, path: str) -> None:
    way.save({"bytes0": [1], "bytes1": "string"}, f"{path}/a")
    state: State = {"bytes0": [2], "bytes1": "other"}
    way.load(state, f"{path}/a")
    assert state == {"bytes0": [1], "bytes1": "string"}


def sharded_and_whole_change_places(way: Way, path: str) -> None:
    flat, other = WHOLE.flatten()[:32], WHOLE.flatten()[100:132]
    specs = (chunked(0, 0, 1), chunked(0, 0, 1, 1, 0), listed((8, 1), (24, 0)))
    for number, spec in enumerate(specs):
        way.save({"cut": filled(spec, flat), "all": other.clone()}, f"{path}/{number}")
        loaded = specs[number - 1]
        state = {"cut": torch.zeros(32), "all": sharded_tensor.zeros(loaded, 32)}
        way.load(state, f"{path}/{number}")
        assert same(state["cut"], flat)
        assert holds(state["all"], other)


# --- test_dtensor_resharding.py, test_dtensor_checkpoint.py ------------------------------------

ONE = ([Shard(0)], [Replicate()])
TWO = (
    [Replicate(), Replicate()],
    [Replicate(), Shard(0)],
    [Shard(0), Replicate()],
    [Shard(0), Shard(0)],
)
SQUARE = torch.arange(16.0).view(4, 4)


def line() -> DeviceMesh:
    return init_device_mesh("cpu", (4,))


def grid() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2))


def cut(mesh: DeviceMesh, placements: Any, whole: torch.Tensor = SQUARE) -> DTensor:
    return distribute_tensor(whole.clone(), mesh, placements, src_data_rank=None)


def zeros(mesh: DeviceMesh, placements: Any, whole: torch.Tensor = SQUARE) -> DTensor:
    return cut(mesh, placements, torch.zeros_like(whole))


Cuts = Sequence[tuple[DeviceMesh, Any]]


def each_goes_into_each(way: Way, path: str, saved: Cuts, loaded: Cuts) -> None:
    way.save({f"{n}": cut(*one) for n, one in enumerate(saved)}, path)
    for one in loaded:
        state = {f"{n}": zeros(*one) for n, _ in enumerate(saved)}
        way.load(state, path)
        for tensor in state.values():
            assert same(tensor, SQUARE)
            assert tensor.placements == tuple(one[1])


def cuts_of_one_mesh(way: Way, path: str) -> None:
    cuts = [(line(), one) for one in ONE]
    each_goes_into_each(way, f"{path}/a", cuts, cuts)


def cuts_of_two_dimensions(way: Way, path: str) -> None:
    cuts = [(grid(), two) for two in TWO]
    each_goes_into_each(way, f"{path}/a", cuts, cuts)


def from_one_to_two_dimensions(way: Way, path: str) -> None:
    saved, loaded = [(line(), one) for one in ONE], [(grid(), two) for two in TWO]
    each_goes_into_each(way, f"{path}/a", saved, loaded)


def from_two_to_one_dimension(way: Way, path: str) -> None:
    saved, loaded = [(grid(), two) for two in TWO], [(line(), one) for one in ONE]
    each_goes_into_each(way, f"{path}/a", saved, loaded)


def ranks_without_any_of_it(way: Way, path: str) -> None:
    way.save({"t": cut(line(), [Shard(0)], torch.tensor([7.0]))}, f"{path}/a")
    state = {"t": zeros(grid(), [Shard(0), Shard(0)], torch.tensor([7.0]))}
    way.load(state, f"{path}/a")
    assert same(state["t"], torch.tensor([7.0]))


def parts_of_other_sizes(way: Way, path: str) -> None:
    whole = torch.arange(27.0).view(9, 3)
    way.save({"t": cut(line(), [Shard(0)], whole)}, f"{path}/a")
    for placements in ([Shard(0), Shard(1)], [Shard(1), Replicate()]):
        state = {"t": zeros(grid(), placements, whole)}
        way.load(state, f"{path}/a")
        assert same(state["t"], whole)


class Described(torch.Tensor):
    """A tensor of which each rank has a part, and tells it by torch's protocol."""

    fqn: str
    local: torch.Tensor
    offset: torch.Size

    @staticmethod
    def __new__(cls, fqn: str, local: torch.Tensor, offset: int, size: int) -> Described:
        made: Described = torch.Tensor._make_wrapper_subclass(cls, (size,), dtype=local.dtype)
        made.fqn, made.local, made.offset = fqn, local, torch.Size([offset])
        return made

    def __init__(self, *_: Any) -> None: ...

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise NotImplementedError(func)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(self.offset, self.local.size())]

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        index = dcp.metadata.MetadataIndex(fqn, self.offset)
        data = TensorWriteData(
            self.__create_chunk_list__()[0],
            TensorProperties.create_from_tensor(self.local),
            self.size(),
        )
        return [WriteItem(index, WriteItemType.SHARD, tensor_data=data)]

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        return self.local


SAVED_PARTS = ((0, 4), (4, 3), (7, 4), (11, 5))
LOADED_PARTS = ((0, 2), (2, 4), (6, 6), (12, 4))


def classes_that_tell_their_parts(way: Way, path: str) -> None:
    start, length = SAVED_PARTS[rank()]
    local = torch.arange(float(start), start + length)
    way.save({"t": Described("t", local, start, 16)}, f"{path}/a")
    start, length = LOADED_PARTS[rank()]
    loaded = Described("t", torch.zeros(length), start, 16)
    way.load({"t": loaded}, f"{path}/a")
    assert same(loaded.local, torch.arange(float(start), start + length))


def wrapped(rows: Sequence[int], fill: torch.Tensor) -> DTensor:
    """Return a DTensor of which each rank has a column in two pieces of so many rows."""
    columns = slice(rank() * 2, rank() * 2 + 2)
    offsets: list[tuple[int, ...]] = []
    pieces, at = [], 0
    for length in rows:
        pieces.append(fill[at : at + length, columns].clone())
        offsets.append((at, rank() * 2))
        at += length
    local = LocalShardsWrapper(pieces, offsets)
    size, stride = torch.Size([6, 8]), (8, 1)
    return DTensor.from_local(local, line(), [Shard(1)], run_check=False, shape=size, stride=stride)


def several_pieces_of_one_rank(way: Way, path: str) -> None:
    whole = torch.arange(48.0).view(6, 8)
    way.save({"t": wrapped((4, 2), whole)}, f"{path}/a")
    loaded: Any = wrapped((1, 2, 3), torch.zeros(6, 8))
    way.load({"t": loaded}, f"{path}/a")
    at = 0
    for piece in loaded.to_local().local_shards():
        assert same(piece, whole[at : at + len(piece), rank() * 2 : rank() * 2 + 2])
        at += len(piece)


class MeshPlaced(torch.nn.Module):
    """A sharded, a replicated and a parameter of two ranks alone, with a state besides."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        values = torch.arange(8.0) * factor
        self.sharded = torch.nn.Parameter(cut(line(), [Shard(0)], values))
        self.replicated = torch.nn.Parameter(cut(line(), [Replicate()], values + 1))
        some = DeviceMesh("cpu", [1, 3])
        self.some = torch.nn.Parameter(cut(some, [Shard(0)], values + 2))
        self.alone = torch.nn.Parameter(cut(DeviceMesh("cpu", [2]), [Replicate()], values + 3))
        self.extra: Any = {"n": int(factor), "t": torch.tensor([float(factor)])}

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def meshes_of_some_ranks(way: Way, path: str) -> None:
    saved, loaded = MeshPlaced(1).state_dict(), MeshPlaced(10).state_dict()
    way.save(saved, f"{path}/a")
    way.load(loaded, f"{path}/a")
    for name in ("sharded", "replicated", "some", "alone"):
        if saved[name].device_mesh.get_coordinate() is None:
            continue  # it is no part of it
        assert torch.equal(loaded[name].to_local(), saved[name].to_local()), name
    assert same(loaded["_extra_state"], {"n": 1, "t": torch.tensor([1.0])})


# --- test_planner.py, test_dedup_tensors.py, test_checkpoint.py --------------------------------


def two_shards_for_one_and_back(way: Way, path: str) -> None:
    flat = torch.arange(128.0)
    eight = [number // 2 for number in range(8)]
    goes_into(way, f"{path}/a", chunked(0, *eight), chunked(0, 0, 1, 2, 3), flat)
    goes_into(way, f"{path}/b", chunked(0, 0, 1, 2, 3), chunked(0, *eight), flat)


def four_shards_for_three(way: Way, path: str) -> None:
    goes_into(way, f"{path}/a", chunked(0, 0, 1, 2, 3), chunked(0, 0, 1, 2), torch.arange(120.0))


def a_box_across_two_shards(way: Way, path: str) -> None:
    saved, loaded = listed((8, 0), (8, 1)), listed((4, 2), (7, 3), (5, 0))
    goes_into(way, f"{path}/a", saved, loaded, torch.arange(16.0))


def replicas_are_stored_once(way: Way, path: str) -> None:
    state = {"all": torch.arange(64.0 * 1024), "st": filled(chunked(0, 0, 1, 2, 3), WHOLE)}
    way.save(state, f"{path}/a")
    nbytes = sum(
        os.path.getsize(os.path.join(folder, name))
        for folder, _, names in os.walk(f"{path}/a")
        for name in names
    )
    assert 64 * 1024 * 4 <= nbytes < 2 * 64 * 1024 * 4


def plans_of_saves_before(way: Way, path: str) -> None:
    # The third is another on rank 0 alone.
    for number in range(4):
        state: State = {"w": cut(line(), [Shard(0)], WHOLE[:8] + number), "n": number}
        if number >= 2:
            state["new"] = torch.full((3,), float(number))
        if way.name == "dist_ckpt":
            way.save(state, f"{path}/{number}")
            continue
        writer = way.writer(f"{path}/{number}")  # type: ignore[attr-defined]
        dcp.save(state, storage_writer=writer, planner=DefaultSavePlanner(enable_plan_caching=True))
    for number in range(4):
        state = {"w": zeros(line(), [Shard(1)], WHOLE[:8]), "n": -1}
        if number >= 2:
            state["new"] = torch.zeros(3)
        way.load(state, f"{path}/{number}")
        assert same(state["w"], WHOLE[:8] + number)
        assert state["n"] == number
        assert number < 2 or same(state["new"], torch.full((3,), float(number)))


def parts_that_overlap(way: Way, path: str) -> None:
    start = (0, 3, 6, 9)[rank()]
    state = {"t": Described("t", torch.ones(4), start, 13)}
    assert error_of(lambda: way.save(state, f"{path}/a"))
    assert not os.path.exists(f"{path}/a/.metadata")
    assert error_of(lambda: way.load({"t": torch.zeros(13)}, f"{path}/a"))


def a_tensor_of_one_rank(way: Way, path: str) -> None:
    goes_into(way, f"{path}/a", chunked(0, 1), chunked(0, 2), torch.arange(16.0).view(4, 4))


def what_is_in_it_is_told(way: Way, path: str) -> None:
    state = {"st": filled(chunked(0, 0, 1), WHOLE), "all": torch.ones(4), "values": [1, 2]}
    way.save(state, f"{path}/a")
    if way.name == "dist_ckpt":
        with dc.open(f"{path}/a") as found:
            tensors, values = found.tensors, found.objects
            assert (tensors["st"].shape, tensors["all"].dtype) == ((10, 20), "float32")
            assert values["values"] == [1, 2]
        return
    entries = way.reader(f"{path}/a").read_metadata().state_dict_metadata  # type: ignore[attr-defined]
    assert (entries["st"].size, entries["all"].properties.dtype) == ((10, 20), torch.float32)
    assert isinstance(entries["values"], dcp.metadata.BytesStorageMetadata)


class Failing:
    """An object of which one rank cannot tell the state, or take it back."""

    def __init__(self, saves: int | None = None, loads: int | None = None) -> None:
        self.saves, self.loads = saves, loads

    def state_dict(self) -> State:
        if rank() == self.saves:
            raise ValueError(f"rank {rank()} cannot tell")
        return {"n": 1}

    def load_state_dict(self, state: State) -> None:
        if rank() == self.loads:
            raise ValueError(f"rank {rank()} cannot take")


def failing_at(step: str, ranks: Sequence[int], base: type) -> type:
    """Return a writer or reader of which a step fails on such ranks."""

    def fail(self: Any, *args: Any, **kwargs: Any) -> Any:
        if rank() in ranks:
            raise ValueError(f"rank {rank()} fails in {step}")
        return getattr(base, step)(self, *args, **kwargs)

    return type("Faulty", (base,), {step: fail})


SAVE_FAILURES = (
    ("set_up_storage_writer", [0]),
    ("prepare_local_plan", [2]),
    ("prepare_global_plan", [0]),
    ("write_data", [3]),
    ("write_data", [1, 2]),
    ("finish", [0]),
)


def a_save_that_fails_on_some_ranks(way: Way, path: str) -> None:
    before = {"st": filled(chunked(0, 0, 1, 2, 3), WHOLE), "n": 1}
    way.save(before, f"{path}/a")
    if way.name == "dist_ckpt":
        for number in range(4):
            state = {**before, "n": 2, "fails": Failing(saves=number)}
            message = error_of(lambda: way.save(state, f"{path}/a"))  # noqa: B023
            assert f"rank {number} cannot tell" in message
    else:
        for step, ranks in SAVE_FAILURES:
            writer, planner = way.writer(f"{path}/b"), dcp.DefaultSavePlanner()  # type: ignore[attr-defined]
            if way.name == "adapter" and step == "write_data":  # what that asks
                step = "resolve_data"  # noqa: PLW2901
                planner = failing_at(step, ranks, dcp.DefaultSavePlanner)()
            else:
                writer = failing_at(step, ranks, type(writer))(f"{path}/b")
            message = error_of(lambda: dcp.save(before, storage_writer=writer, planner=planner))  # noqa: B023
            assert f"rank {ranks[0]} fails in {step}" in message
    state = State(st=sharded_tensor.zeros(chunked(0, 0, 1, 2, 3), 10, 20), n=0)
    way.load(state, f"{path}/a")
    assert state["n"] == 1
    assert holds(state["st"], WHOLE)


LOAD_FAILURES = (
    ("read_metadata", [0]),
    ("set_up_storage_reader", [0]),
    ("prepare_local_plan", [1]),
    ("prepare_global_plan", [0]),
    ("read_data", [1]),
)


def a_load_that_fails_on_some_ranks(way: Way, path: str) -> None:
    way.save({"st": filled(chunked(0, 0, 1, 2, 3), WHOLE), "kept": Failing()}, f"{path}/a")
    if way.name == "dist_ckpt":
        for number in range(4):
            state: State = {"st": filled(chunked(0, 0, 1), WHOLE), "kept": Failing(loads=number)}
            message = error_of(lambda: way.load(state, f"{path}/a"))  # noqa: B023
            assert f"rank {number} cannot take" in message
        return
    for step, ranks in LOAD_FAILURES:
        reader, planner = way.reader(f"{path}/a"), dcp.DefaultLoadPlanner()  # type: ignore[attr-defined]
        if way.name == "adapter" and step == "read_data":  # what that asks
            step = "resolve_tensor"  # noqa: PLW2901
            planner = failing_at(step, ranks, dcp.DefaultLoadPlanner)()
        else:
            reader = failing_at(step, ranks, type(reader))(f"{path}/a")
        state = {"st": filled(chunked(0, 0, 1), WHOLE)}
        message = error_of(lambda: dcp.load(state, storage_reader=reader, planner=planner))  # noqa: B023
        assert f"rank {ranks[0]} fails in {step}" in message or step == "read_metadata"


# --- e2e/test_e2e_save_and_load.py, test_fsspec.py ---------------------------------------------


class Meeting(Kept):
    """An object that talks to the other ranks when it is loaded: the order must be the same."""

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        total = torch.tensor([state["n"]])
        if state["n"] == 1:
            dist.all_reduce(total)
        else:
            dist.all_gather([torch.zeros_like(total) for _ in range(4)], total)


def keys_in_another_order(way: Way, path: str) -> None:
    state: State = {"a": Meeting({"n": 1}), "b": Meeting({"n": 2})}
    if rank():
        state = dict(reversed(state.items()))
    way.save(state, f"{path}/a")
    way.load(state, f"{path}/a")
    assert [state[key].num_loaded for key in "ab"] == [1, 1]


def one_over_the_other(way: Way, path: str) -> None:
    for value in (1.0, 2.0):
        way.save({"x": torch.full((10,), value)}, f"{path}/a")
    message = error_of(lambda: way.save({"x": torch.zeros(10)}, f"{path}/a", overwrite=False))
    assert "overwrite" in message
    state = {"x": torch.zeros(10)}
    way.load(state, f"{path}/a")
    assert same(state["x"], torch.full((10,), 2.0))


def a_place_of_fsspec(way: Way, path: str) -> None:
    if way.name == "dcp":
        return  # it has a writer for it, which needs fsspec
    way.save({"t": cut(line(), [Shard(0)])}, "memory://runs/a")


def saved_beside_the_training(way: Way, path: str) -> None:
    state: State = {"t": cut(line(), [Shard(0)]), "n": 1}
    wait = way.async_save(state, f"{path}/a")
    state["t"].to_local().zero_()
    wait()
    meet()
    loaded = {"t": zeros(grid(), [Shard(1), Shard(0)]), "n": 0}
    way.load(loaded, f"{path}/a")
    assert same(loaded["t"], SQUARE)
    assert loaded["n"] == 1


# --- test_hf_safetensor_e2e.py, test_consolidate_hf_safetensors.py -----------------------------


def through_safetensors(way: Way, path: str, saved: Cuts, loaded: Cuts) -> None:
    tensors = {f"{n}": cut(*one) for n, one in enumerate(saved)}
    if way.name == "dcp":
        writer = dcp.HuggingFaceStorageWriter(f"{path}/hf", save_distributed=True)
        dcp.save(tensors, storage_writer=writer)
    else:
        way.save({"model": tensors}, f"{path}/a")
        if rank() == 0:
            export_folder(f"{path}/a", f"{path}/hf")
    meet()
    for one in loaded:
        state = {f"{n}": zeros(*one) for n, _ in enumerate(saved)}
        way.load_hf(state, f"{path}/hf")
        assert all(same(tensor, SQUARE) for tensor in state.values())


def safetensors_of_one_mesh(way: Way, path: str) -> None:
    cuts = [(line(), one) for one in ONE]
    through_safetensors(way, path, cuts, cuts)


def safetensors_of_two_dimensions(way: Way, path: str) -> None:
    cuts = [(grid(), two) for two in TWO]
    through_safetensors(way, path, cuts, cuts)


def safetensors_from_one_to_two(way: Way, path: str) -> None:
    saved, loaded = [(line(), one) for one in ONE], [(grid(), two) for two in TWO]
    through_safetensors(way, path, saved, loaded)


def safetensors_from_two_to_one(way: Way, path: str) -> None:
    saved, loaded = [(grid(), two) for two in TWO], [(line(), one) for one in ONE]
    through_safetensors(way, path, saved, loaded)


def safetensors_files_of_whole_tensors(way: Way, path: str) -> None:
    from safetensors.torch import load_file

    tensors = {"rows": cut(line(), [Shard(0)]), "columns": cut(line(), [Shard(1)])}
    if way.name == "dcp":
        mapping = {"rows": 1, "columns": 2}
        writer = dcp.HuggingFaceStorageWriter(
            f"{path}/hf",
            fqn_to_index_mapping=mapping,
            save_distributed=True,
            enable_consolidation=True,
        )
        dcp.save(tensors, storage_writer=writer)
    else:
        way.save({"model": tensors}, f"{path}/a")
        if rank() == 0:
            export_folder(f"{path}/a", f"{path}/hf", max_shard_size=100)
    meet()
    found = {}
    for name in os.listdir(f"{path}/hf"):
        if name.endswith("-of-00002.safetensors") and name.startswith("model-"):
            found.update(load_file(f"{path}/hf/{name}"))
    assert same(found, {"rows": SQUARE, "columns": SQUARE})
