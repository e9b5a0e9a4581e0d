"""Leaves of a state -> what a rank holds. Fake process groups make this process each rank."""

from __future__ import annotations

import warnings
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from dist_ckpt.core.format.geometry import ElementRange, Region
from dist_ckpt.core.planning import tensor_views
from dist_ckpt.core.planning.tensor_views import compute_cells
from dist_ckpt.core.runtime.torch_private import AsyncCollectiveTensor, ShardedTensor, StridedShard
from dist_ckpt.core.shard_io.memory.torch_tensor import slices_of
from dist_ckpt.core.state.tensors import dtensors
from dist_ckpt.core.state.tensors.locate_tensor import (
    empty_like,
    is_meta,
    is_tensor_leaf,
    locate_for_load,
    locate_for_save,
    materialize,
    tie_key,
)
from dist_ckpt.core.state.wrappers import FlatShard, LocalShard
from torch_can import cut_unevenly, need_strided, wrap_several_boxes

ALONE: dict[str, Any] = {"rank": 0, "group_ranks": (0,)}


def alone(value, fqn="w"):
    return locate_for_save(value, fqn, **ALONE)


@pytest.fixture
def on_ranks():
    """A function that yields the ranks of a world, with this process being each in turn."""

    def run(world_size):
        for rank in range(world_size):
            dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
            try:
                yield rank
            finally:
                dist.destroy_process_group()

    yield run
    if dist.is_initialized():
        dist.destroy_process_group()


def numbered(*shape):
    return torch.arange(torch.Size(shape).numel()).view(shape)


def check_parts(held, full):
    """Every part is the memory that its cell says it is."""
    assert held.shape == tuple(full.shape)
    for cell, part in zip(held.cells, held.parts, strict=True):
        if isinstance(cell, ElementRange):
            assert part.tolist() == full.reshape(-1)[cell.start : cell.stop].tolist()
        else:
            assert tuple(part.shape) == cell.shape
            assert part.tolist() == full[slices_of(cell)].tolist()


# --- DTensor ---------------------------------------------------------------------------------

PLACEMENTS_1D = [
    Replicate(),
    Shard(0),
    Shard(1),
    StridedShard(0, split_factor=2),
    StridedShard(1, split_factor=3),
]


@pytest.mark.parametrize("placement", PLACEMENTS_1D, ids=str)
@pytest.mark.parametrize("shape", [(8, 6), (7, 5), (1, 2), (2, 1), (0, 3), (5, 0)], ids=str)
def test_every_placement_on_a_line_of_ranks_is_read_as_torch_cuts_it(on_ranks, placement, shape):
    need_strided([placement])
    full = numbered(*shape)
    covered = torch.zeros(shape)
    for rank in on_ranks(3):
        mesh = init_device_mesh("cpu", (3,))
        tensor = distribute_tensor(full, mesh, [placement], src_data_rank=None)
        held = locate_for_save(tensor, "w", rank=rank, group_ranks=range(3))
        check_parts(held, full)
        assert held.dtype == "int64"
        assert isinstance(held.view, tensor_views.MeshPlaced)
        assert compute_cells(held.view, rank, shape) == held.cells
        for cell in held.cells:
            assert isinstance(cell, Region)
            covered[slices_of(cell)] += 1
    assert (covered == (3 if placement == Replicate() else 1)).all()


PLACEMENTS_2D = list(
    product(
        [Replicate(), Shard(0), Shard(1), StridedShard(0, split_factor=2)],
        [Replicate(), Shard(0), Shard(1), StridedShard(0, split_factor=3)],
    )
)


@pytest.mark.parametrize("placements", PLACEMENTS_2D, ids=str)
def test_every_placement_on_a_grid_of_ranks_is_read_as_torch_cuts_it(on_ranks, placements):
    need_strided(placements)
    for shape in [(12, 6), (7, 5), (11, 2), (3, 3)]:
        full = numbered(*shape)
        copies = torch.zeros(shape)
        for rank in on_ranks(6):
            mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))
            tensor = distribute_tensor(full, mesh, placements, src_data_rank=None)
            held = locate_for_save(tensor, "w", rank=rank, group_ranks=range(6))
            check_parts(held, full)
            for cell in held.cells:
                assert isinstance(cell, Region)
                copies[slices_of(cell)] += 1
        replicas = torch.tensor([3, 2])[[p == Replicate() for p in placements]].prod()
        assert (copies == replicas).all()


@pytest.mark.skipif(not cut_unevenly(), reason="FSDP2 over TP cuts evenly only in this torch")
@pytest.mark.parametrize("style", [ColwiseParallel, RowwiseParallel])
@pytest.mark.parametrize("ranks", [(2, 2), (3, 2), (2, 3), (3, 3)], ids=str)
def test_fsdp_over_tp_holds_what_its_memory_says_however_uneven(on_ranks, style, ranks):
    dp, tp = ranks
    for size in (4, 5, 7, 8, 11):
        full = numbered(size, 6 * tp).float() if style is ColwiseParallel else numbered(6, size)
        full = full.float()
        copies = torch.zeros(full.shape)
        for rank in on_ranks(dp * tp):
            mesh = init_device_mesh("cpu", ranks, mesh_dim_names=("dp", "tp"))
            layer = torch.nn.Linear(full.shape[1], full.shape[0], bias=False)
            model = torch.nn.Sequential(layer)
            with torch.no_grad():
                layer.weight.copy_(full)
            parallelize_module(model, mesh["tp"], {"0": style()}, src_data_rank=None)
            fully_shard(model, mesh=mesh["dp"])
            held = locate_for_save(layer.weight, "w", rank=rank, group_ranks=range(dp * tp))
            check_parts(held, full)
            for cell in held.cells:
                assert isinstance(cell, Region)
                copies[slices_of(cell)] += 1
        assert (copies == 1).all()


@pytest.mark.skipif(not cut_unevenly(), reason="FSDP2 over TP cuts evenly only in this torch")
def test_in_a_torch_that_cuts_in_a_third_way_only_fsdp_s_uneven_shards_are_taken(
    on_ranks, monkeypatch
):
    monkeypatch.setattr(dtensors, "cuts_strided_alike", lambda: False)
    full, copies = numbered(7).view(7, 1).float(), torch.zeros(7, 1)
    for rank in on_ranks(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        layer = torch.nn.Linear(1, 7, bias=False)
        model = torch.nn.Sequential(layer)
        with torch.no_grad():
            layer.weight.copy_(full)
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()}, src_data_rank=None)
        fully_shard(model, mesh=mesh["dp"])
        held = locate_for_save(layer.weight, "w", rank=rank, group_ranks=range(4))
        check_parts(held, full)
        assert compute_cells(held.view, rank, (7, 1)) == held.cells
        for cell in held.cells:
            assert isinstance(cell, Region)
            copies[slices_of(cell)] += 1
        uneven = DTensor.from_local(
            torch.ones(2, 1),
            mesh,
            [StridedShard(0, split_factor=4), Shard(0)],
            run_check=False,
            shape=torch.Size((7, 1)),
            stride=(1, 1),
        )
        with pytest.raises(ValueError, match="does not fit its placements"):
            locate_for_save(uneven, "w", rank=rank, group_ranks=range(4))
    assert (copies == 1).all()


def test_a_shape_that_reads_in_two_ways_is_given_as_explicit_cells(on_ranks):
    placements = (StridedShard(0, split_factor=2), Shard(0))
    need_strided(placements)
    views = set()
    for rank in on_ranks(6):
        mesh = init_device_mesh("cpu", (3, 2))
        for size in (7, 12):
            tensor = distribute_tensor(numbered(size), mesh, placements, src_data_rank=None)
            views.add(
                (size, type(locate_for_save(tensor, "w", rank=rank, group_ranks=range(6)).view))
            )
    assert views == {(7, tensor_views.Parts), (12, tensor_views.MeshPlaced)}


def test_a_rank_that_cannot_tell_what_it_holds_says_so(on_ranks):
    # FSDP over TP gives rank 10 row 26 of 27, torch's placements row 20; both are one row. It
    # takes an uneven cut into fewer rows a rank than there are TP ranks.
    placements = (StridedShard(0, split_factor=4), Shard(0))
    need_strided(placements)
    for rank in on_ranks(12):
        mesh = init_device_mesh("cpu", (3, 4))
        tensor = distribute_tensor(numbered(27), mesh, placements, src_data_rank=None)
        if rank != 10:
            check_parts(
                locate_for_save(tensor, "w", rank=rank, group_ranks=range(12)), numbered(27)
            )
        else:
            with pytest.raises(ValueError, match=r"w: .*\(27,\).* two ways"):
                locate_for_save(tensor, "w", rank=rank, group_ranks=range(12))


def test_ranks_of_a_mesh_are_named_by_their_number_in_the_group(on_ranks):
    for rank in on_ranks(8):
        mesh = DeviceMesh("cpu", [[6, 2], [4, 0]])
        tensor = DTensor.from_local(
            torch.full((2, 3), rank), mesh, [Shard(0), Replicate()], run_check=False
        )
        group = (0, 2, 4, 6)
        if rank not in group:
            continue
        held = locate_for_save(tensor, "w", rank=group.index(rank), group_ranks=group)
        assert held.view == tensor_views.MeshPlaced(
            tensor_views.Mesh(("", ""), (2, 2), (3, 1, 2, 0)),
            (tensor_views.ShardedAxis(0), tensor_views.ReplicatedAxis()),
        )
        assert held.cells == (Region((0 if rank in (6, 2) else 2, 0), (2, 3)),)


def test_a_rank_outside_the_mesh_holds_nothing(on_ranks):
    for rank in on_ranks(4):
        mesh = DeviceMesh("cpu", [1, 3])
        tensor = distribute_tensor(numbered(4), mesh, [Shard(0)], src_data_rank=None)
        held = locate_for_save(tensor, "w", rank=rank, group_ranks=range(4))
        assert (len(held.cells), held.shape, held.dtype) == (rank % 2, (4,), "int64")


def test_every_rank_sees_its_own_slice_of_a_mesh(on_ranks):
    for rank in on_ranks(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        tensor = distribute_tensor(numbered(4), mesh["tp"], [Shard(0)], src_data_rank=None)
        held = locate_for_save(tensor, "w", rank=rank, group_ranks=range(4))
        first = rank // 2 * 2
        assert isinstance(held.view, tensor_views.MeshPlaced)
        assert held.view.mesh == tensor_views.Mesh(("tp",), (2,), (first, first + 1))
        assert held.cells == (Region((rank % 2 * 2,), (2,)),)


def test_a_mesh_beyond_the_group_is_refused(on_ranks):
    for _ in on_ranks(2):
        mesh = init_device_mesh("cpu", (2,))
        tensor = distribute_tensor(numbered(4), mesh, [Shard(0)], src_data_rank=None)
        with pytest.raises(ValueError, match=r"w: its mesh has the global ranks \[1\]"):
            locate_for_save(tensor, "w", rank=0, group_ranks=(0,))


def test_a_partial_dtensor_is_refused(on_ranks):
    for _ in on_ranks(2):
        mesh = init_device_mesh("cpu", (2,))
        tensor = DTensor.from_local(torch.ones(2), mesh, [Partial()], run_check=False)
        with pytest.raises(ValueError, match=r"layer\.w: .*Partial.* `redistribute`"):
            locate_for_save(tensor, "layer.w", rank=0, group_ranks=range(2))


def test_a_local_tensor_of_another_shape_than_the_placements_give_is_refused(on_ranks):
    for _ in on_ranks(2):
        mesh = init_device_mesh("cpu", (2,))
        tensor = DTensor.from_local(
            torch.ones(5), mesh, [Shard(0)], run_check=False, shape=torch.Size((8,)), stride=(1,)
        )
        with pytest.raises(ValueError, match=r"local tensor of shape \(5,\).*LocalShard"):
            locate_for_save(tensor, "w", rank=0, group_ranks=range(2))


def test_parameters_that_require_grad_share_their_memory_with_the_parts(on_ranks):
    for rank in on_ranks(2):
        mesh = init_device_mesh("cpu", (2,))
        parameter = torch.nn.Parameter(
            distribute_tensor(torch.zeros(4), mesh, [Shard(0)], src_data_rank=None)
        )
        held = locate_for_save(parameter, "w", rank=rank, group_ranks=range(2))
        assert not held.parts[0].requires_grad
        held.parts[0].fill_(3)
        assert isinstance(parameter, DTensor)
        assert parameter.to_local().tolist() == [3, 3]


def test_a_local_tensor_on_its_way_is_waited_for(on_ranks):
    for rank in on_ranks(2):
        mesh = init_device_mesh("cpu", (2,))
        local = AsyncCollectiveTensor(torch.ones(2))
        tensor = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
        held = locate_for_save(tensor, "w", rank=rank, group_ranks=range(2))
        assert type(held.parts[0]) is torch.Tensor
        assert type(alone(AsyncCollectiveTensor(torch.ones(2))).parts[0]) is torch.Tensor


# --- other sharded classes -------------------------------------------------------------------


def test_a_sharded_tensor_holds_its_local_shards(on_ranks):
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed._shard.sharded_tensor import Shard as LocalPart
    from torch.distributed._shard.sharded_tensor import ShardedTensorMetadata, TensorProperties

    full = numbered(5, 2).bfloat16()
    for rank in on_ranks(2):
        cuts = [
            ShardMetadata([0, 0], [3, 2], "rank:0/cpu"),
            ShardMetadata([3, 0], [2, 2], "rank:1/cpu"),
        ]
        mine = cuts[rank]
        local = full[mine.shard_offsets[0] :][: mine.shard_sizes[0]].clone()
        tensor = ShardedTensor._init_from_local_shards_and_global_metadata(
            [LocalPart(local, mine)],
            ShardedTensorMetadata(cuts, full.shape, TensorProperties(dtype=torch.bfloat16)),
        )
        held = locate_for_save(tensor, "w", rank=rank, group_ranks=range(2))
        assert (held.dtype, len(held.cells)) == ("bfloat16", 1)
        assert held.view == tensor_views.Parts(held.cells)
        check_parts(held, full)


@pytest.mark.skipif(not wrap_several_boxes(), reason="this torch takes no two boxes as one")
def test_a_dtensor_of_several_local_boxes_holds_them_all(on_ranks):
    from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

    full = numbered(4, 6)
    for rank in on_ranks(2):
        mesh = init_device_mesh("cpu", (2,))
        local = LocalShardsWrapper([full[:, 0:2], full[:, 4:6]], [(0, 0), (0, 4)])
        if rank == 1:
            local = LocalShardsWrapper([full[:, 2:4]], [(0, 2)])
        tensor = DTensor.from_local(
            local, mesh, [Shard(1)], run_check=False, shape=full.shape, stride=(6, 1)
        )
        held = locate_for_save(tensor, "w", rank=rank, group_ranks=range(2))
        assert len(held.cells) == 2 - rank
        check_parts(held, full)
        tensor = DTensor.from_local(
            LocalShardsWrapper([], []),
            mesh,
            [Shard(1)],
            run_check=False,
            shape=full.shape,
            stride=(6, 1),
        )
        assert locate_for_save(tensor, "w", rank=rank, group_ranks=range(2)).cells == ()


class Halves:
    """A third-party class that is not even a torch.Tensor."""

    shape = (4, 2)
    dtype = torch.int64

    def __init__(self, full, sizes=(2, 2)):
        self.full, self.sizes = full, sizes

    def __create_chunk_list__(self):
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        sizes = torch.Size(self.sizes)
        return [ChunkStorageMetadata(torch.Size(o), sizes) for o in ((0, 0), (2, 0))]

    def __get_tensor_shard__(self, index):
        assert index.offset[0] == 2 * index.index
        return self.full[index.offset[0] :][:2]


def test_a_third_party_class_is_asked_for_its_parts():
    full = numbered(4, 2)
    assert is_tensor_leaf(Halves(full))
    held = alone(Halves(full))
    assert len(held.cells) == 2
    check_parts(held, full)
    with pytest.raises(
        ValueError, match=r"reports a chunk of \(1, 2\).* returns a tensor of \(2, 2\)"
    ):
        alone(Halves(full, sizes=(1, 2)))
    assert not is_tensor_leaf(Halves), "the class itself is not a tensor"


# --- plain tensors and our wrappers ----------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (3,), (0,), (2, 0), (2, 3)], ids=str)
def test_a_plain_tensor_is_held_whole(shape):
    held = alone(torch.nn.Buffer(torch.ones(shape)))
    assert held.cells == (Region.whole(shape),)
    assert (held.dtype, held.shape, held.view) == ("float32", shape, tensor_views.Whole())


def test_local_shards_are_explicit_cells():
    full = numbered(6, 4)
    held = alone(LocalShard(full[2:4, 1:], (6, 4), (2, 1)))
    assert held.view == tensor_views.Parts((Region((2, 1), (2, 3)),))
    check_parts(held, full)
    held = alone(FlatShard(full.view(-1)[5:17], (6, 4), 5))
    assert held.view == tensor_views.Parts((ElementRange(5, 17),))
    check_parts(held, full)
    held = alone(FlatShard(full[1:3], (6, 4), 4))
    assert held.parts[0].shape == (8,)
    check_parts(held, full)


def test_empty_local_shards_hold_nothing_unless_the_tensor_is_empty():
    assert alone(LocalShard(torch.ones(0, 4), (6, 4), (6, 0))).cells == ()
    assert alone(FlatShard(torch.ones(0), (6, 4), 24)).cells == ()
    for empty in (
        LocalShard(torch.ones(0, 4), (0, 4), (0, 0)),
        FlatShard(torch.ones(0), (0, 4), 0),
    ):
        held = alone(empty)
        assert held.cells == (Region.whole((0, 4)),)
        assert held.parts[0].shape == (0, 4)


def test_wrappers_hold_tensors_only():
    with pytest.raises(TypeError, match=r"w: LocalShard holds a numpy.ndarray.*from_numpy"):
        alone(LocalShard(np.ones(2), (4,), (0,)))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="make it contiguous"):
        alone(FlatShard(torch.ones(4, 4).t(), (16,), 0))


class Named(torch.Tensor):
    """A class that only gives a tensor a name, as that of an image."""


class Setting(torch.nn.Parameter):
    """A parameter that carries how it is to be used."""


def test_a_class_that_adds_no_data_is_stored_as_the_tensor_that_it_is():
    parameter = Setting(torch.ones(2, 3))
    vars(parameter).update(tensor_parallel=True, loader=alone, dims=(0, None))
    for value in (torch.ones(2, 3).as_subclass(Named), parameter):
        held = locate_for_load(value, "w", **ALONE)
        assert type(held.parts[0]) is torch.Tensor
        assert held.parts[0].data_ptr() == value.data_ptr()


def refused():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantised = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
        compressed = torch.eye(2).to_sparse_csr()
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
        masked = torch.masked.masked_tensor(torch.ones(2), torch.tensor([True, False]))
    freed = torch.ones(3)
    freed.untyped_storage().resize_(0)
    shortened = torch.ones(8)
    shortened.untyped_storage().resize_(16)
    from torch._subclasses import FakeTensorMode

    with_scales = torch.ones(2).as_subclass(Named)
    vars(with_scales)["scales"] = torch.ones(2)
    with_object = Setting(torch.ones(2))
    vars(with_object)["quant_state"] = object()
    return {
        "to_dense": torch.eye(2).to_sparse(),
        "sparse_csr": compressed,
        "unbind": nested,
        "offsets": torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged),
        "int_repr": quantised,
        "FakeTensor": FakeTensorMode().from_tensor(torch.ones(2)),
        "MaskedTensor": masked,
        "its 'scales' is a torch.Tensor, which would be lost": with_scales,
        "its 'quant_state' is a builtins.object": with_object,
        "run the module once": torch.nn.UninitializedParameter(),
        "memory of this tensor": freed,
        "memory": shortened,
        "transform": torch._to_functional_tensor(torch.ones(2)),
        "is missing": torch._efficientzerotensor(3),
    }


def test_everything_whose_memory_is_not_its_value_is_refused_by_name():
    for remedy, value in refused().items():
        assert is_tensor_leaf(value)
        with pytest.raises((TypeError, ValueError), match=remedy) as caught:
            alone(value, "layer.w")
        assert str(caught.value).startswith("layer.w: ")
    with pytest.raises(TypeError, match="to_dense"):
        alone(LocalShard(torch.eye(2).to_sparse(), (2, 2), (0, 0)))
    assert not is_tensor_leaf(5)


def test_tensors_inside_a_torch_transform_are_refused():
    def body(x):
        with pytest.raises(ValueError, match="transform"):
            alone(x)
        return x

    torch.vmap(body)(torch.ones(2, 3))


# --- meta tensors, targets -------------------------------------------------------------------


def test_meta_tensors_are_refused_until_they_are_materialized():
    with torch.device("meta"):
        parameter = torch.nn.Parameter(torch.empty(2, 3), requires_grad=False)
        shard = LocalShard(torch.empty(2, 3), (4, 3), (2, 0))
    for value in (parameter, shard):
        assert is_meta(value)
        with pytest.raises(ValueError, match="w: a meta tensor has no data"):
            alone(value)
        with pytest.raises(ValueError, match="w: a meta tensor has no memory"):
            locate_for_load(value, "w", **ALONE)
        made = materialize(value)
        assert type(made) is type(value)
        assert not is_meta(made)
        assert locate_for_load(made, "w", **ALONE).parts[0].device.type == "cpu"
    made = materialize(parameter)
    assert isinstance(made, torch.nn.Parameter)
    assert not made.requires_grad
    assert not is_meta(3)


def test_a_meta_dtensor_is_materialized_on_the_device_of_its_mesh(on_ranks):
    for rank in on_ranks(2):
        mesh = init_device_mesh("cpu", (2,))
        value = distribute_tensor(
            torch.empty(5, 2, device="meta"), mesh, [Shard(0)], src_data_rank=None
        )
        assert is_meta(value)
        made = materialize(torch.nn.Parameter(value))
        assert isinstance(made, torch.nn.Parameter)
        assert isinstance(made, DTensor)
        assert (tuple(made.shape), made.placements) == ((5, 2), (Shard(0),))
        held = locate_for_load(made, "w", rank=rank, group_ranks=range(2))
        assert held.parts[0].device.type == "cpu"
        assert held.parts[0].shape == (3 - rank, 2)


def test_new_optimizer_state_has_the_layout_of_its_parameter_and_the_saved_dtype(on_ranks):
    plain = empty_like(torch.nn.Parameter(torch.ones(2, 3, dtype=torch.bfloat16)), torch.float32)
    assert (type(plain), plain.dtype, plain.requires_grad) == (torch.Tensor, torch.float32, False)
    for _ in on_ranks(2):
        mesh = init_device_mesh("cpu", (2,))
        parameter = torch.nn.Parameter(
            distribute_tensor(torch.ones(5), mesh, [Shard(0)], src_data_rank=None)
        )
        made = empty_like(parameter, torch.float64)
        assert isinstance(made, DTensor)
        assert (made.dtype, made.placements, made.requires_grad) == (
            torch.float64,
            (Shard(0),),
            False,
        )
        assert not isinstance(made, torch.nn.Parameter)
        assert isinstance(parameter, DTensor)
        assert made.to_local().shape == parameter.to_local().shape


def test_a_target_that_overlaps_itself_is_refused_but_may_be_saved():
    value = torch.ones(1, 3).expand(4, 3)
    assert alone(value).shape == (4, 3)
    with pytest.raises(ValueError, match=r"w: shape \(4, 3\).*`clone\(\)`"):
        locate_for_load(value, "w", **ALONE)


# --- ties ------------------------------------------------------------------------------------


def test_tied_tensors_have_one_key():
    base = torch.ones(4, 4, dtype=torch.complex64)

    def key(value):
        return tie_key(alone(value))

    assert key(base) == key(base.detach()) == key(torch.nn.Parameter(base)) == key(base.view(4, 4))
    different = [base.t(), base[:2], base[1:3], base.view(16), base.conj(), base.clone()]
    keys = [key(value) for value in [base, *different]]
    assert len(set(keys)) == len(keys)
    assert key(torch.empty(0, 4)) is None
    assert key(LocalShard(torch.ones(0), (3,), (3,))) is None
    assert key(base.view(torch.float64)) != key(base)


def test_tied_dtensors_have_one_key(on_ranks):
    for rank in on_ranks(2):
        mesh = init_device_mesh("cpu", (2,))
        tensor = distribute_tensor(torch.ones(4), mesh, [Shard(0)], src_data_rank=None)
        again = DTensor.from_local(tensor.to_local(), mesh, [Shard(0)], run_check=False)
        where = {"rank": rank, "group_ranks": range(2)}
        assert tie_key(locate_for_save(tensor, "a", **where)) == tie_key(
            locate_for_save(again, "b", **where)
        )
        local = locate_for_save(tensor.to_local(), "c", **where)
        assert tie_key(local) != tie_key(locate_for_save(tensor, "a", **where))
