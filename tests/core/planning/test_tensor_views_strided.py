"""What a placement with a strided shard may mean."""

from __future__ import annotations

import pytest

from dist_ckpt.core.format.geometry import Region
from dist_ckpt.core.planning.tensor_views import (
    Mesh,
    MeshPlaced,
    ReplicatedAxis,
    ShardedAxis,
    StridedAxis,
    compute_cells,
    possible_views,
    reorder_axes,
)

DP_TP = Mesh(("dp", "tp"), (3, 2), (0, 1, 2, 3, 4, 5))
FSDP_OVER_TP = MeshPlaced(DP_TP, (StridedAxis(0, 2), ShardedAxis(0)))


def test_the_axis_that_cut_first_comes_first():
    assert reorder_axes(FSDP_OVER_TP) == MeshPlaced(
        Mesh(("tp", "dp"), (2, 3), (0, 2, 4, 1, 3, 5)), (ShardedAxis(0), ShardedAxis(0))
    )


def test_a_strided_axis_comes_after_those_that_make_up_its_split_factor():
    mesh = Mesh(("a", "b", "c", "d"), (2, 3, 5, 7), tuple(range(210)))
    view = MeshPlaced(mesh, (StridedAxis(0, 5), ShardedAxis(1), ShardedAxis(0), StridedAxis(1, 1)))
    applied = reorder_axes(view)
    assert applied is not None
    assert applied.mesh.names == ("b", "d", "c", "a")
    assert applied.mesh.shape == (3, 7, 5, 2)
    assert applied.placements == (ShardedAxis(1), ShardedAxis(1), ShardedAxis(0), ShardedAxis(0))


def test_replicated_axes_cut_nothing_and_come_last():
    mesh = Mesh(("r", "dp", "tp"), (2, 2, 2), tuple(range(8)))
    applied = reorder_axes(MeshPlaced(mesh, (ReplicatedAxis(), StridedAxis(0, 2), ShardedAxis(0))))
    assert applied == MeshPlaced(
        Mesh(("tp", "dp", "r"), (2, 2, 2), (0, 4, 2, 6, 1, 5, 3, 7)),
        (ShardedAxis(0), ShardedAxis(0), ReplicatedAxis()),
    )


@pytest.mark.parametrize(
    "placements",
    [
        (ShardedAxis(0), ShardedAxis(0)),
        (StridedAxis(0, 4), ShardedAxis(0)),
        (StridedAxis(0, 2), ShardedAxis(1)),
        (ShardedAxis(0), StridedAxis(0, 2)),
    ],
)
def test_no_other_order_is_made_up(placements):
    assert reorder_axes(MeshPlaced(DP_TP, placements)) is None
    assert possible_views(MeshPlaced(DP_TP, placements), (7, 7)) == (MeshPlaced(DP_TP, placements),)


def test_sizes_that_divide_evenly_can_be_read_in_one_way_only():
    assert possible_views(FSDP_OVER_TP, (12, 5)) == (FSDP_OVER_TP,)


def test_uneven_sizes_that_give_the_same_cells_can_be_read_in_one_way_only():
    view = MeshPlaced(Mesh(("dp", "tp"), (2, 2), (0, 1, 2, 3)), (StridedAxis(0, 2), ShardedAxis(0)))
    assert possible_views(view, (7,)) == (view,)


def test_what_fsdp_holds_comes_before_what_torch_says():
    fsdp, torchs = possible_views(FSDP_OVER_TP, (7,))
    assert torchs == FSDP_OVER_TP
    assert [compute_cells(fsdp, rank, (7,)) for rank in (4, 5)] == [(), (Region((6,), (1,)),)]
    assert [compute_cells(torchs, rank, (7,)) for rank in (4, 5)] == [(Region((6,), (1,)),), ()]


def test_where_torch_cuts_in_a_third_way_only_what_fsdp_holds_is_read():
    fsdp, _ = possible_views(FSDP_OVER_TP, (7,))
    assert possible_views(FSDP_OVER_TP, (7,), as_defined=False) == (fsdp,)
    assert possible_views(FSDP_OVER_TP, (12, 5), as_defined=False) == (FSDP_OVER_TP,)
    alone = MeshPlaced(DP_TP, (StridedAxis(0, 4), ShardedAxis(0)))
    assert possible_views(alone, (7,), as_defined=False) == ()
    uneven = MeshPlaced(DP_TP, (ShardedAxis(0), ShardedAxis(0)))
    assert possible_views(uneven, (7,), as_defined=False) == (uneven,)
