"""Find the boxes that overlap a box, without a look at all of them.

Boxes that tile a tensor irregularly are sorted into a tree. Each node is halved along the dimension
with the most boxes side by side. A search costs about the size of its result plus the logarithm of
the number of boxes; a thin box across many boxes costs more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import lt, sub, truediv

from dist_ckpt.core.format.geometry import Region, Shape

# With fewer boxes, to compare each costs less than to descend.
_LEAF_SIZE = 8


@dataclass(frozen=True, slots=True)
class _BoxNode:
    start: Shape
    stop: Shape
    numbers: tuple[int, ...]
    halves: tuple[_BoxNode, ...]


class BoxTree:
    """Boxes to search, identified by their numbers. Empty boxes never match."""

    def __init__(self, boxes: Sequence[Region]) -> None:
        self._corners = [(box.offset, box.stop) for box in boxes]
        numbers = [number for number, box in enumerate(boxes) if box.numel]
        self._root = self._node(numbers) if numbers else None

    def find_overlapping(self, box: Region) -> list[int]:
        """Return the numbers, ascending, of the boxes that overlap this one."""
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

    def _node(self, numbers: list[int]) -> _BoxNode:
        starts, stops = zip(*(self._corners[number] for number in numbers), strict=True)
        start = tuple(map(min, zip(*starts, strict=True)))
        stop = tuple(map(max, zip(*stops, strict=True)))
        if len(numbers) <= _LEAF_SIZE or not start:
            return _BoxNode(start, stop, tuple(numbers), ())
        # The number of average boxes side by side, up to a factor that all dimensions share.
        lengths = map(sub, map(sum, zip(*stops, strict=True)), map(sum, zip(*starts, strict=True)))
        abreast = list(map(truediv, map(sub, stop, start), lengths))
        dim = abreast.index(max(abreast))
        ordered = sorted(numbers, key=lambda number: self._corners[number][0][dim])
        middle = len(ordered) // 2
        halves = self._node(ordered[:middle]), self._node(ordered[middle:])
        return _BoxNode(start, stop, (), halves)
