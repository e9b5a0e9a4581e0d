from itertools import product
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_ckpt.core.format.geometry import (
    ByteRange,
    ElementRange,
    Region,
    RegionPiece,
    find_ranges,
    pieces,
    row_major_strides,
    split_into_boxes,
)
from long_mode import examples

SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def regions_in(draw, shape):
    bounds = [sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
    return Region(tuple(a for a, _ in bounds), tuple(b - a for a, b in bounds))


@st.composite
def shape_and_regions(draw, count):
    shape = draw(SHAPES)
    return shape, *(draw(regions_in(shape)) for _ in range(count))


@st.composite
def shape_and_elements(draw):
    shape = draw(SHAPES)
    start, stop = sorted(draw(st.tuples(st.integers(0, prod(shape)), st.integers(0, prod(shape)))))
    return shape, ElementRange(start, stop)


def elements_of(region):
    return set(
        product(*(range(o, o + n) for o, n in zip(region.offset, region.shape, strict=True)))
    )


def numbers_of(region, shape):
    strides = row_major_strides(shape)
    return [
        sum(i * s for i, s in zip(e, strides, strict=True)) for e in sorted(elements_of(region))
    ]


@given(shape_and_regions(2))
def test_an_intersection_holds_what_both_hold(case):
    _, a, b = case
    common = a.intersect(b)
    assert (elements_of(common) if common else set()) == elements_of(a) & elements_of(b)
    assert common == b.intersect(a)


@given(shape_and_regions(2))
def test_a_region_covers_another_if_it_holds_all_of_it(case):
    _, a, b = case
    if b.numel:
        assert a.covers(b) == (elements_of(b) <= elements_of(a))


@given(shape_and_elements())
def test_a_range_of_elements_is_cut_into_few_boxes_in_row_major_order(case):
    shape, elements = case
    boxes = list(split_into_boxes(elements, shape))
    assert [n for box in boxes for n in numbers_of(box, shape)] == [
        *range(elements.start, elements.stop)
    ]
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    assert all(box.numel for box in boxes)


@given(shape_and_elements())
def test_pieces_say_where_their_boxes_begin_in_the_cells_memory(case):
    shape, elements = case
    memory = list(range(elements.start, elements.stop))
    for piece in pieces(elements, shape):
        assert memory[piece.start : piece.start + piece.region.numel] == numbers_of(
            piece.region, shape
        )


def test_a_box_is_its_own_piece():
    region = Region((1, 0), (2, 3))
    assert list(pieces(region, (4, 4))) == [RegionPiece(region, 0)]


def test_a_region_in_coordinates_of_another_begins_at_its_corner():
    assert Region((5, 7), (1, 2)).relative_to((4, 7)) == Region((1, 0), (1, 2))


def test_regions_elements_and_spans_read_as_people_write_them():
    assert str(Region((0, 2), (5, 3))) == "0:5,2:5"
    assert str(Region.whole(())) == ""
    assert str(ElementRange(3, 9)) == "flat 3:9"
    assert ByteRange(3, 9).nbytes == 6
    assert ElementRange(3, 9).numel == 6


def test_strides_of_a_scalar_a_vector_and_a_box():
    assert row_major_strides(()) == ()
    assert row_major_strides((7,)) == (1,)
    assert row_major_strides((2, 3, 4)) == (12, 4, 1)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Region((0,), (1, 1)),
        lambda: Region((-1,), (1,)),
        lambda: Region((0,), (-1,)),
        lambda: ElementRange(-1, 0),
        lambda: ElementRange(2, 1),
    ],
)
def test_a_region_that_is_none_is_not_built(make):
    with pytest.raises(ValueError, match=r"differ|negative|invalid range"):
        make()


@examples()
@given(data=st.data(), gap=st.integers(1, 40))
def test_runs_leave_out_exactly_the_holes_that_are_long_enough(data, gap):
    shape = tuple(data.draw(st.lists(st.integers(1, 7), max_size=4)))
    region = Region((3,) * len(shape), shape)
    corners = [
        sorted((data.draw(st.integers(0, n - 1)), data.draw(st.integers(1, n)))) for n in shape
    ]
    box = Region(tuple(a + 3 for a, _ in corners), tuple(max(b - a, 1) for a, b in corners))
    strides = row_major_strides(shape)
    held = [
        10 + sum((i - 3) * s for i, s in zip(index, strides, strict=True))
        for index in sorted(elements_of(box))
    ]
    ranges = list(find_ranges(box, RegionPiece(region, 10), gap))
    expected = [ElementRange(held[0], held[0] + 1)]
    for place in held[1:]:
        if place - expected[-1].stop < gap:
            expected[-1] = ElementRange(expected[-1].start, place + 1)
        else:
            expected.append(ElementRange(place, place + 1))
    assert ranges == expected
