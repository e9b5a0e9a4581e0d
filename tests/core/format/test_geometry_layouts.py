from itertools import product
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_ckpt.core.format.geometry import (
    Cell,
    ElementRange,
    Flat,
    Grid,
    Layout,
    Region,
    Regions,
    Shape,
    check_cell,
    check_cut,
    check_shape,
    check_tiling,
)

# A tiling that no straight cut divides.
PINWHEEL = [
    Region((0, 0), (2, 1)),
    Region((0, 1), (1, 2)),
    Region((1, 1), (1, 1)),
    Region((1, 2), (2, 1)),
    Region((2, 0), (1, 2)),
]


@st.composite
def tilings(draw, dims=3):
    """Cut a box in two again and again, each part on its own."""
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=dims)))
    regions = [Region.whole(shape)]
    for _ in range(draw(st.integers(0, 6))):
        region = regions.pop(draw(st.integers(0, len(regions) - 1)))
        dims_left = [d for d, n in enumerate(region.shape) if n > 1]
        if not dims_left:
            regions.append(region)
            continue
        dim = draw(st.sampled_from(dims_left))
        cut = draw(st.integers(1, region.shape[dim] - 1))
        low, high, moved = list(region.shape), list(region.shape), list(region.offset)
        low[dim], high[dim], moved[dim] = cut, region.shape[dim] - cut, region.offset[dim] + cut
        regions += [Region(region.offset, tuple(low)), Region(tuple(moved), tuple(high))]
    return shape, regions


def elements_of(region):
    return product(*(range(o, o + n) for o, n in zip(region.offset, region.shape, strict=True)))


@given(tilings(), st.randoms())
def test_a_tiling_is_taken_in_any_order(tiling, random):
    shape, regions = tiling
    random.shuffle(regions)
    check_tiling(regions, shape)


@given(tilings(), st.data())
def test_a_changed_tiling_is_taken_only_if_it_still_is_one(tiling, data):
    shape, regions = tiling
    number = data.draw(st.integers(0, len(regions) - 1))
    old = regions[number]
    match data.draw(st.sampled_from(["drop", "twice", "move"])):
        case "drop":
            del regions[number]
        case "twice":
            regions.append(old)
        case _:
            bounds = [sorted(data.draw(st.tuples(*[st.integers(0, n)] * 2))) for n in shape]
            regions[number] = Region(tuple(a for a, _ in bounds), tuple(b - a for a, b in bounds))
    counts = dict.fromkeys(elements_of(Region.whole(shape)), 0)
    for region in regions:
        for element in elements_of(region):
            counts[element] += 1
    if all(n == 1 for n in counts.values()) and all(region.numel for region in regions):
        check_tiling(regions, shape)
    else:
        with pytest.raises(ValueError, match=r"overlap at|hole at|is empty|no regions"):
            check_tiling(regions, shape)


def test_a_pinwheel_is_a_tiling():
    check_tiling(PINWHEEL, (3, 3))


@pytest.mark.parametrize(
    ("regions", "message"),
    [
        (PINWHEEL[:2] + PINWHEEL[3:], r"leave a hole at \[1, 1\]"),
        ([*PINWHEEL, Region((2, 1), (1, 1))], r"overlap at \[2, 1\]"),
        ([Region((0, 0), (3, 2)), Region((0, 1), (3, 1))], r"overlap at \[0, 1\].*9 elements"),
        ([Region((0, 0), (3, 4))], r"region \[0:3,0:4\] outside shape \[3, 3\]"),
        ([Region((0,), (3,))], r"outside shape"),
        ([*PINWHEEL, Region((0, 0), (0, 3))], "is empty"),
        ([], "no regions"),
    ],
)
def test_what_is_wrong_with_regions_is_said_with_its_place(regions, message):
    with pytest.raises(ValueError, match=message):
        check_tiling(regions, (3, 3))


def test_a_scalar_and_an_empty_tensor_have_one_region():
    check_tiling([Region((), ())], ())
    check_tiling([Region((0, 0), (0, 4))], (0, 4))
    with pytest.raises(ValueError, match="overlap"):
        check_tiling([Region((), ())] * 2, ())
    with pytest.raises(ValueError, match="empty tensor"):
        check_tiling([Region((0, 0), (0, 2)), Region((0, 2), (0, 2))], (0, 4))


def test_many_rows_and_cells_of_a_grid_are_checked_at_once():
    check_tiling([Region((i, 0), (1, 8)) for i in range(20_000)], (20_000, 8))
    grid = Grid((tuple(range(33)), tuple(range(33)), tuple(range(9))))
    check_tiling([grid.cell(n) for n in range(grid.num_cells)], (32, 32, 8))


def test_a_grid_of_twelve_dimensions_is_checked_although_its_cells_have_4096_corners():
    grid = Grid(((0, 1, 2),) * 12)
    check_tiling([grid.cell(n) for n in range(grid.num_cells)], (2,) * 12)


def test_regions_that_cut_many_dimensions_at_once_are_no_bait():
    # Half of what is left, in one dimension after the other: 2**20 corners that cancel only in
    # the end.
    regions: list[Region] = []
    offset: Shape = (0,) * 20
    shape: Shape = (2,) * 20
    for dim in range(20):
        regions.append(Region(offset, (*shape[:dim], 1, *shape[dim + 1 :])))
        offset = (*offset[:dim], 1, *offset[dim + 1 :])
        shape = (*shape[:dim], 1, *shape[dim + 1 :])
    regions.append(Region(offset, shape))
    with pytest.raises(ValueError, match="too many dimensions"):
        check_tiling(regions, (2,) * 20)
    check_tiling([Region((n, 0), (1, 8)) for n in range(1000)], (1000, 8))


@given(st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=3), max_size=3))
def test_the_cells_of_a_grid_tile_the_tensor_in_row_major_order(steps):
    cuts = tuple(tuple(sum(sizes[:i]) for i in range(len(sizes) + 1)) for sizes in steps)
    shape = tuple(map(sum, steps))
    grid = Grid(cuts)
    cells = [grid.cell(n) for n in range(grid.num_cells)]
    check_cut(grid, shape)
    check_tiling(cells, shape)
    assert cells == sorted(cells)
    check_cut(Regions(tuple(cells)), shape)


def test_the_cells_of_a_flat_layout_follow_each_other():
    flat = Flat((0, 3, 7, 12))
    assert [flat.cell(n) for n in range(3)] == [
        ElementRange(0, 3),
        ElementRange(3, 7),
        ElementRange(7, 12),
    ]
    check_cut(flat, (3, 4))
    assert Regions((Region((), ()),)).cell(0) == Region((), ())


@pytest.mark.parametrize(
    ("cut", "shape"),
    [
        (Grid(((0, 2, 4),)), (5,)),
        (Grid(((1, 4),)), (4,)),
        (Grid(((0, 3, 2, 4),)), (4,)),
        (Grid(((0, 2, 2, 4),)), (4,)),
        (Grid(((0, 0, 0),)), (0,)),
        (Grid(((0,),)), (0,)),
        (Grid(((),)), (4,)),
        (Grid(((0, 4),)), (4, 1)),
        (Grid(()), (1,)),
        (Flat((0, 11)), (3, 4)),
        (Flat((0, 12, 12)), (3, 4)),
        (Flat(()), (3, 4)),
        (Regions((Region((0,), (4,)),)), (5,)),
    ],
)
def test_a_cut_that_does_not_tile_the_tensor_is_refused(cut, shape):
    with pytest.raises(ValueError, match=r"cut|hole"):
        check_cut(cut, shape)


def test_an_empty_tensor_has_one_empty_cell():
    check_cut(Grid(((0, 0), (0, 4))), (0, 4))
    check_cut(Flat((0, 0)), (0, 4))
    assert Grid(((0, 0), (0, 4))).cell(0) == Region((0, 0), (0, 4))
    assert Grid(()).cell(0) == Region((), ())


def test_each_holder_stores_its_turn():
    layout = Layout(Flat((0, 1, 2, 3)), ((0, 4), (1, 5, 9), (2,)))
    assert [layout.holder(n, 0) for n in range(3)] == [0, 5, 2]
    assert [layout.holder(n, 1) for n in range(3)] == [4, 9, 2]
    assert layout.cell(1) == ElementRange(1, 2)


@pytest.mark.parametrize("holders", [((0,),), ((0,), ()), ((0,), (1,), (2,))])
def test_every_cell_has_holders(holders):
    with pytest.raises(ValueError, match="2 cells need"):
        Layout(Flat((0, 1, 2)), holders)


def test_a_shape_that_overflows_is_refused():
    check_shape((1 << 60,), 4)
    for shape in [(1 << 61,), (1 << 63, 0), (1 << 32, 1 << 32, 0), (1,) * 65]:
        with pytest.raises(ValueError, match=r"overflows|dimensions"):
            check_shape(shape, 4)


def test_a_cell_lies_in_its_tensor():
    check_cell(ElementRange(3, 12), (3, 4))
    check_cell(Region((3, 0), (0, 4)), (3, 4))
    outside: list[Cell] = [ElementRange(3, 13), Region((3, 0), (1, 4)), Region((0,), (3,))]
    for cell in outside:
        with pytest.raises(ValueError, match=r"outside shape|elements 3:13 of 12"):
            check_cell(cell, (3, 4))
    assert prod(()) == 1
