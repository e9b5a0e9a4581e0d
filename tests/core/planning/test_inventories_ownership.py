"""What the ranks say of one tensor makes one layout, or an error that names them."""

from __future__ import annotations

import pytest

from dist_ckpt.core.format.geometry import Cell, ElementRange, Flat, Grid, Region, Regions, Shape
from dist_ckpt.core.planning.save.inventories import RankView, merge_views
from dist_ckpt.core.planning.tensor_views import (
    Flattened,
    Mesh,
    MeshPlaced,
    Parts,
    ReplicatedAxis,
    RuleSharded,
    ShardedAxis,
    View,
    Whole,
)
from tilings import line


def share(view: View, shape: Shape, *ranks: int) -> RankView:
    return RankView(ranks, view, shape)


def rows(start: int, stop: int, width: int = 4) -> Region:
    return Region((start, 0), (stop - start, width))


def parts(shape: Shape, *cells: Cell | None) -> list[RankView]:
    """Return shares of ranks 0, 1, ... with one cell each, or none."""
    return [share(Parts((cell,) if cell else ()), shape, rank) for rank, cell in enumerate(cells)]


def test_whole_tensors_are_replicas_of_each_other() -> None:
    shape, layout = merge_views([share(Whole(), (2, 3), 0, 4), share(Whole(), (2, 3), 2)])
    assert shape == (2, 3)
    assert layout.cut == Grid(((0, 2), (0, 3)))
    assert layout.holders == ((0, 2, 4),)


def test_equal_cuts_of_several_meshes_are_replicas() -> None:
    shares = [
        share(MeshPlaced(line(0, 1), (ShardedAxis(0),)), (4,), 0, 1),
        share(MeshPlaced(line(2, 3), (ShardedAxis(0),)), (4,), 2, 3),
    ]
    assert merge_views(shares)[1].holders == ((0, 2), (1, 3))


def test_replicated_on_a_mesh_and_whole_elsewhere_are_replicas() -> None:
    shares = [
        share(MeshPlaced(line(2, 0), (ReplicatedAxis(),)), (4,), 0, 2),
        share(Whole(), (4,), 1),
    ]
    assert merge_views(shares)[1].holders == ((0, 1, 2),)


def test_rows_that_ranks_name_themselves_are_a_grid() -> None:
    _, layout = merge_views(parts((6, 4), rows(4, 6), rows(0, 3), rows(3, 4), rows(0, 3)))
    assert layout.cut == Grid(((0, 3, 4, 6), (0, 4)))
    assert layout.holders == ((1, 3), (2,), (0,))


def test_boxes_that_make_no_grid_are_a_list() -> None:
    cells = [Region((0, 0), (2, 2)), Region((0, 2), (1, 2)), Region((1, 2), (1, 2))]
    _, layout = merge_views(parts((2, 4), *cells))
    assert layout.cut == Regions(tuple(cells))


def test_uneven_ranges_of_elements_are_flat() -> None:
    _, layout = merge_views(
        parts((2, 4), ElementRange(5, 8), None, ElementRange(0, 5), ElementRange(5, 8))
    )
    assert layout.cut == Flat((0, 5, 8))
    assert layout.holders == ((2,), (0, 3))


def test_explicit_parts_fit_the_cells_of_a_mesh() -> None:
    view = MeshPlaced(line(0, 1), (ShardedAxis(0),))
    shares = [share(view, (4,), 0, 1), share(Parts((Region((2,), (2,)),)), (4,), 2)]
    assert merge_views(shares)[1].holders == ((0,), (1, 2))


def test_an_empty_tensor_is_held_by_those_who_say_so() -> None:
    shares = [share(Parts(()), (0, 3), 0), share(Parts((Region((0, 0), (0, 3)),)), (0, 3), 1, 2)]
    assert merge_views(shares)[1].holders == ((1, 2),)


def test_a_rank_outside_the_mesh_holds_nothing() -> None:
    view = MeshPlaced(line(1, 2), (ShardedAxis(0),))
    shares = [share(view, (4,), 1, 2, 3), share(Parts(()), (4,), 0)]
    assert merge_views(shares)[1].holders == ((1,), (2,))


def test_replicas_are_those_whose_states_have_the_tensor() -> None:
    mesh = Mesh(("dp", "tp"), (2, 2), (0, 1, 2, 3))
    view = MeshPlaced(mesh, (ReplicatedAxis(), ShardedAxis(0)))
    assert merge_views([share(view, (4,), 0, 1, 3)])[1].holders == ((0,), (1, 3))


def test_local_tensors_line_up_along_the_axes_of_the_mesh() -> None:
    mesh = Mesh(("a", "b", "dp"), (2, 2, 2), tuple(range(8)))
    view = RuleSharded(mesh, ((0, 1), ()))
    shares = [share(view, (3, 5), 0, 1), share(view, (2, 5), 2, 3, 6, 7), share(view, (0, 5), 4, 5)]
    shape, layout = merge_views(shares)
    assert shape == (7, 5)
    assert layout.cut == Grid(((0, 3, 5, 7), (0, 5)))
    assert layout.holders == ((0, 1), (2, 3), (6, 7))


def test_a_stage_of_a_pipeline_holds_its_tensors_alone() -> None:
    mesh = Mesh(("pp", "tp"), (2, 2), (0, 1, 2, 3))
    shape, layout = merge_views([share(RuleSharded(mesh, ((1,),)), (3,), 2, 3)])
    assert shape == (6,)
    assert layout.holders == ((2,), (3,))


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        (
            [share(Whole(), (2,), 0, 1), share(Whole(), (3,), 2)],
            r"shape \(2,\) on ranks 0-1, \(3,\) on rank 2",
        ),
        (parts((6, 4), rows(0, 3), rows(2, 6)), r"\[0:3,0:4\] on rank 0 overlaps \[2:6,0:4\] on r"),
        (parts((6, 4), rows(0, 3), rows(4, 6)), r"hole at \[3, 0\].* parts of it are on ranks 0-1"),
        (
            parts((8,), ElementRange(0, 5), ElementRange(4, 8)),
            r"\[flat 0:5\] on rank 0 overlaps \[flat 4:8",
        ),
        (
            parts((8,), ElementRange(0, 5), ElementRange(6, 8)),
            r"no rank holds the elements 5:6 of 8",
        ),
        (parts((8,), ElementRange(1, 8)), r"no rank holds the elements 0:1 of 8"),
        (parts((8,), ElementRange(0, 7)), r"no rank holds the elements 7:8 of 8"),
        (parts((6, 4), rows(0, 7)), r"region \[0:7,0:4\] outside shape \[6, 4\], on rank 0"),
        (parts((8,), ElementRange(0, 9)), r"elements 0:9 of 8, on rank 0"),
        (
            parts((8,), ElementRange(0, 4), Region((4,), (4,))),
            "ranges of elements on rank 0 and boxes on rank 1",
        ),
        (parts((8,), None, None), "the states of ranks 0-1 name it, but no rank holds a part"),
        (
            [share(MeshPlaced(line(0, 1, 2), (ShardedAxis(0),)), (6,), 0, 2)],
            r"in the mesh, \[2:4\] is on rank 1\. But only the state of ranks 0, 2 has",
        ),
        (
            [share(Flattened(line(0, 1)), (6,), 0), share(Whole(), (6,), 1)],
            r"in the mesh, \[flat 3:6\] is on rank 1",
        ),
        (
            [share(RuleSharded(line(0, 1), ((0,),)), (6,), 0), share(Whole(), (6,), 1)],
            "held by a rule of the ShardingConfig on rank 0, in another way on rank 1",
        ),
        (
            [share(RuleSharded(line(0, 1), ((0,), ())), (3, 4), 0, 1), share(Whole(), (3, 4), 2)],
            "held by a rule",
        ),
        (
            [
                share(RuleSharded(line(0, 1), ((0,), ())), (3, 4), 0),
                share(RuleSharded(line(0, 1), ((0,), ())), (3, 5), 1),
            ],
            "dimension 1 is 4 on rank 0 and 5 on rank 1",
        ),
        (
            [share(RuleSharded(line(0, 1, 2), ((0,),)), (3,), 0, 2)],
            "x cuts dimension 0, but the part of rank 1 is on no rank",
        ),
        (
            [share(RuleSharded(line(0, 1), ((0,),)), (3,), 0, 1, 5)],
            "rank 5 is outside the ShardingConfig's mesh",
        ),
        (
            [
                share(RuleSharded(line(0, 1), ((0,),)), (3,), 0),
                share(RuleSharded(line(0, 1), ((0,),)), (3, 1), 1),
            ],
            r"local shape \(3,\) on rank 0, \(3, 1\) on rank 1",
        ),
    ],
)
def test_what_does_not_fit_together_is_an_error_with_ranks(
    shares: list[RankView], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        merge_views(shares)


def test_overlaps_are_found_among_many_parts() -> None:
    cells = [Region((0, n), (4, 1)) for n in range(50)]
    cells[20] = Region((2, 20), (2, 2))
    with pytest.raises(
        ValueError, match=r"\[0:4,21:22\] on rank 21 overlaps \[2:4,20:22\] on rank 2"
    ):
        merge_views(parts((4, 50), *cells))
