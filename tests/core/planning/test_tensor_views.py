"""Meshes cut tensors exactly as torch does."""

from __future__ import annotations

from itertools import product
from math import prod
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_ckpt.core.format.geometry import ElementRange, Flat, Grid, Region, Shape, check_cut
from dist_ckpt.core.planning.tensor_views import (
    AxisPlacement,
    Flattened,
    Mesh,
    MeshPlaced,
    Parts,
    ReplicatedAxis,
    RuleSharded,
    ShardedAxis,
    StridedAxis,
    Whole,
    compute_cells,
    compute_layout,
)
from dist_ckpt.core.runtime.torch_private import cuts_strided_alike
from long_mode import examples, sampled_params
from tilings import elements_of, line, placed, random_mesh, randoms, shapes

SQUARE = Mesh(("dp", "tp"), (2, 2), (0, 1, 2, 3))


def rows(view: MeshPlaced, size: int) -> list[list[int]]:
    """Return the rows that each rank of the mesh holds."""
    return [
        [row for cell in compute_cells(view, rank, (size,)) for row in elements_of(cell, (size,))]
        for rank in view.mesh.ranks
    ]


def torch_local(view: MeshPlaced, shape: Shape, rank: int) -> object:
    """Return the local tensor of a rank as torch's own placements split a tensor."""
    import torch
    from torch.distributed.tensor.placement_types import Shard as TorchShard
    from torch.distributed.tensor.placement_types import _StridedShard

    shape_of_mesh = view.mesh.shape
    coordinate = torch.unravel_index(torch.tensor(view.mesh.ranks.index(rank)), shape_of_mesh)
    local = torch.arange(prod(shape)).view(shape)
    for placement, count, at in zip(view.placements, view.mesh.shape, coordinate, strict=True):
        match placement:
            case ReplicatedAxis():
                continue
            case ShardedAxis(dim):
                of_torch: Any = TorchShard(dim)
            case StridedAxis(dim, split_factor):
                of_torch = _StridedShard(dim, split_factor=split_factor)
        local = of_torch._split_tensor(local, count, with_padding=False)[0][at]
    return local


def our_local(view: MeshPlaced, shape: Shape, rank: int) -> object:
    """Return the local tensor of a rank, put together from its cells."""
    import torch

    cells = compute_cells(view, rank, shape)
    if not cells:
        return None
    local = torch.arange(prod(shape)).view(shape)
    for dim in range(len(shape)):
        runs = sorted({(c.offset[dim], c.stop[dim]) for c in cells if isinstance(c, Region)})
        index = torch.tensor([n for start, stop in runs for n in range(start, stop)])
        local = local.index_select(dim, index)
    assert prod(local.shape) == sum(cell.numel for cell in cells)
    order = [(c.offset) for c in cells if isinstance(c, Region)]
    assert order == sorted(order), "the boxes are in the order of the local tensor"
    return local


def assert_as_torch(view: MeshPlaced, shape: Shape) -> None:
    import torch

    if not cuts_strided_alike() and any(isinstance(one, StridedAxis) for one in view.placements):
        return  # an older torch; the other placements are compared
    for rank in view.mesh.ranks:
        theirs, ours = torch_local(view, shape, rank), our_local(view, shape, rank)
        assert isinstance(theirs, torch.Tensor)
        if ours is None:
            assert theirs.numel() == 0, (view, shape, rank)
        else:
            assert isinstance(ours, torch.Tensor)
            assert torch.equal(theirs, ours), (view, shape, rank)


@pytest.mark.parametrize("size", sampled_params([*range(1, 14), 16, 24, 31], 4))
def test_every_pair_of_placements_on_one_dimension_cuts_as_torch_does(size: int) -> None:
    choices: list[AxisPlacement] = [ReplicatedAxis(), ShardedAxis(0)]
    choices += [StridedAxis(0, factor) for factor in (1, 2, 3, 4, 5)]
    for mesh in ((2, 2), (3, 2), (2, 3), (1, 4)):
        for placements in product(choices, repeat=2):
            ranks = tuple(range(prod(mesh)))
            assert_as_torch(MeshPlaced(Mesh(("dp", "tp"), mesh, ranks), placements), (size,))


@pytest.mark.slow
@examples()
@given(random=randoms, shape=st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple))
def test_random_placements_cut_as_torch_does(random: Random, shape: Shape) -> None:
    mesh = random_mesh(random, 24)
    placements: list[AxisPlacement] = []
    for _ in mesh.shape:
        dim = random.randrange(len(shape))
        strided = StridedAxis(dim, random.randint(1, 5))
        kinds: list[AxisPlacement] = [ReplicatedAxis(), ShardedAxis(dim), strided]
        placements.append(random.choice(kinds))
    assert_as_torch(MeshPlaced(mesh, tuple(placements)), shape)


@pytest.mark.slow
@examples()
@given(random=randoms, shape=shapes)
def test_a_layout_gives_each_rank_the_cells_that_it_holds(random: Random, shape: Shape) -> None:
    (view, _), *_ = placed(random, shape, 12).views.values()
    assert isinstance(view, MeshPlaced)
    layout = compute_layout(view, shape)
    check_cut(layout.cut, shape)
    for rank in range(12):
        held = {layout.cell(n) for n, ranks in enumerate(layout.holders) if rank in ranks}
        assert held == set(compute_cells(view, rank, shape)), (view, rank)
    assert all(list(ranks) == sorted(set(ranks)) for ranks in layout.holders)


@examples()
@given(random=randoms, shape=shapes)
def test_even_ranges_of_elements_tile_a_tensor(random: Random, shape: Shape) -> None:
    ranks = random.sample(range(9), random.randint(1, 9))
    view = Flattened(line(*ranks))
    layout = compute_layout(view, shape)
    check_cut(layout.cut, shape)
    for rank in range(9):
        held = {layout.cell(n) for n, who in enumerate(layout.holders) if rank in who}
        assert held == set(compute_cells(view, rank, shape))
    sizes = sorted(cell.numel for rank in ranks for cell in compute_cells(view, rank, shape))
    assert all(size == sizes[-1] for size in sizes[1:]) or 0 in shape


def test_fsdp_over_tp_gives_each_rank_one_run_of_rows() -> None:
    view = MeshPlaced(SQUARE, (StridedAxis(0, 2), ShardedAxis(0)))
    assert rows(view, 8) == [[0, 1], [4, 5], [2, 3], [6, 7]]


def test_a_strided_shard_alone_is_several_regions() -> None:
    view = MeshPlaced(SQUARE, (StridedAxis(0, 2), ReplicatedAxis()))
    assert compute_cells(view, 0, (8, 3)) == (Region((0, 0), (2, 3)), Region((4, 0), (2, 3)))
    assert rows(view, 8) == [[0, 1, 4, 5]] * 2 + [[2, 3, 6, 7]] * 2


def test_runs_that_touch_are_one_region() -> None:
    view = MeshPlaced(line(0), (StridedAxis(0, 4),))
    assert compute_cells(view, 0, (8,)) == (Region((0,), (8,)),)


def test_chunks_may_leave_the_last_ranks_without_a_shard() -> None:
    view = MeshPlaced(line(0, 1, 2, 3), (ShardedAxis(0),))
    assert rows(view, 5) == [[0, 1], [2, 3], [4], []]
    assert compute_layout(view, (5,)).holders == ((0,), (1,), (2,))


def test_ranks_of_a_submesh_keep_their_own_numbers() -> None:
    view = MeshPlaced(line(6, 2), (ShardedAxis(1),))
    layout = compute_layout(view, (3, 4))
    assert layout.cut == Grid(((0, 3), (0, 2, 4)))
    assert layout.holders == ((6,), (2,))
    assert compute_cells(view, 0, (3, 4)) == ()


@pytest.mark.parametrize("view", [MeshPlaced(line(3, 1), (ShardedAxis(0),)), Flattened(line(3, 1))])
def test_an_empty_tensor_is_one_cell_that_all_ranks_of_its_mesh_hold(
    view: MeshPlaced | Flattened,
) -> None:
    layout = compute_layout(view, (4, 0))
    assert layout.cut == Grid(((0, 4), (0, 0)))
    assert layout.holders == ((1, 3),)
    assert compute_cells(view, 3, (4, 0)) == (Region.whole((4, 0)),)
    assert compute_cells(view, 0, (4, 0)) == ()


def test_a_tensor_without_dimensions_is_one_cell() -> None:
    view = MeshPlaced(SQUARE, (ReplicatedAxis(), ReplicatedAxis()))
    assert compute_layout(view, ()).holders == ((0, 1, 2, 3),)
    assert compute_cells(view, 2, ()) == (Region((), ()),)
    assert compute_cells(Flattened(line(5, 6)), 5, ()) == (ElementRange(0, 1),)
    assert compute_cells(Flattened(line(5, 6)), 6, ()) == ()
    assert compute_layout(Flattened(line(5, 6)), ()).cut == Flat((0, 1))


def test_other_views_say_themselves_what_a_rank_holds() -> None:
    parts = (ElementRange(3, 5), ElementRange(0, 1))
    assert compute_cells(Whole(), 7, (2, 3)) == (Region.whole((2, 3)),)
    assert compute_cells(Parts(parts), 7, (6,)) == parts
    with pytest.raises(ValueError, match="only the plan has the cells"):
        compute_cells(RuleSharded(SQUARE, ((0,),)), 0, (2,))
