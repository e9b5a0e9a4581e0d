"""A tree of boxes finds what looking at every box would find."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_ckpt.core.format.geometry import BoxTree, Region
from long_mode import examples
from tilings import randoms, split


def random_box(random: Random, ndim: int) -> Region:
    offset = tuple(random.randint(0, 9) for _ in range(ndim))
    return Region(offset, tuple(random.randint(0, 4) for _ in range(ndim)))


def looked_for(boxes: list[Region], wanted: Region) -> list[int]:
    return [number for number, box in enumerate(boxes) if box.intersect(wanted) is not None]


@pytest.mark.slow
@examples()
@given(random=randoms, ndim=st.integers(0, 3), count=st.integers(0, 60))
def test_it_finds_the_boxes_that_have_common_elements(
    random: Random, ndim: int, count: int
) -> None:
    boxes = [random_box(random, ndim) for _ in range(count)]
    tree = BoxTree(boxes)
    for wanted in (random_box(random, ndim), Region.whole((14,) * ndim), *boxes[:3]):
        expected = looked_for(boxes, wanted) if wanted.numel else []
        assert tree.find_overlapping(wanted) == expected


@pytest.mark.slow
@examples()
@given(random=randoms)
def test_it_finds_what_meets_in_irregular_tilings(random: Random) -> None:
    tilings = []
    for _ in range(2):
        boxes = [Region.whole((40, 30))]
        for _ in range(80):
            at = random.randrange(len(boxes))
            boxes[at : at + 1] = split(random, boxes[at])
        tilings.append(boxes)
    tree = BoxTree(tilings[0])
    for wanted in tilings[1]:
        assert tree.find_overlapping(wanted) == looked_for(tilings[0], wanted)


def test_boxes_at_the_same_place_are_all_found() -> None:
    boxes = [Region((1, 1), (2, 2))] * 50
    assert BoxTree(boxes).find_overlapping(Region((2, 2), (1, 1))) == list(range(50))
    assert BoxTree(boxes).find_overlapping(Region((3, 3), (1, 1))) == []
