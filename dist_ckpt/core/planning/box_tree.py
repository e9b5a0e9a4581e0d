"""Find the boxes that overlap a box, without a comparison with every box.

Boxes that tile a tensor irregularly are sorted into a tree. Each node is halved along the dimension
with the most boxes side by side. A search costs about the size of its result plus the logarithm of
the number of boxes. A thin box across many boxes costs more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import lt, sub, truediv

from dist_ckpt.core.format.geometry import Region, Shape

# With fewer boxes, comparisons cost less than another level of the tree.
_LEAF_SIZE = 8


@dataclass(frozen=True, slots=True)
class _BoxNode:
    start: Shape
    stop: Shape
    numbers: tuple[int, ...]
    halves: tuple[_BoxNode, ...]


class BoxTree:
    """A tree of boxes, identified by their numbers. Empty boxes overlap nothing."""

    def __init__(self, boxes: Sequence[Region]) -> None:
        self._corners = [(box.offset, box.stop) for box in boxes]
        numbers = [number for number, box in enumerate(boxes) if box.numel]
        self._root = self._build_node(numbers) if numbers else None

    def find_overlapping(self, box: Region) -> list[int]:
        """Return the numbers, ascending, of the boxes that overlap `box`."""
        start, stop = box.offset, box.stop
        if self._root is None or box.numel == 0:
            return []
        overlapping: list[int] = []
        nodes = [self._root]
        while nodes:
            node = nodes.pop()
            if all(map(lt, node.start, stop)) and all(map(lt, start, node.stop)):
                nodes += node.halves
                for number in node.numbers:
                    first, last = self._corners[number]
                    if all(map(lt, first, stop)) and all(map(lt, start, last)):
                        overlapping.append(number)
        return sorted(overlapping)

    def _build_node(self, numbers: list[int]) -> _BoxNode:
        starts, stops = zip(*(self._corners[number] for number in numbers), strict=True)
        start = tuple(map(min, zip(*starts, strict=True)))
        stop = tuple(map(max, zip(*stops, strict=True)))
        if len(numbers) <= _LEAF_SIZE or not start:
            return _BoxNode(start, stop, tuple(numbers), ())
        # The number of average boxes side by side, up to a factor that is equal in all dimensions.
        lengths = map(sub, map(sum, zip(*stops, strict=True)), map(sum, zip(*starts, strict=True)))
        side_by_side = list(map(truediv, map(sub, stop, start), lengths))
        dim = side_by_side.index(max(side_by_side))
        ordered = sorted(numbers, key=lambda number: self._corners[number][0][dim])
        middle = len(ordered) // 2
        halves = self._build_node(ordered[:middle]), self._build_node(ordered[middle:])
        return _BoxNode(start, stop, (), halves)
