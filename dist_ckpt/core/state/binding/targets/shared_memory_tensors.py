"""Tensors of a state that share memory: read apart, then put in place and compared.

Where two of them share bytes, the last one written would decide silently. What was saved cannot
tell whether they shared memory then as well, but it agrees on those bytes if they did.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from operator import add, le

import torch

from dist_ckpt.core.shard_io.memory.torch_tensor import as_words
from dist_ckpt.errors import IncompatibleError


@dataclass(frozen=True, slots=True, eq=False)
class AliasStaging:
    """The local parts of a tensor, and memory like them on the host that is read into first."""

    name: str
    parts: tuple[torch.Tensor, ...]
    read: tuple[torch.Tensor, ...]

    @staticmethod
    def of(name: str, parts: Sequence[torch.Tensor]) -> AliasStaging:
        """Make the memory."""
        read = (torch.empty(part.shape, dtype=part.dtype, device="cpu") for part in parts)
        return AliasStaging(name, tuple(parts), tuple(read))

    def put(self) -> None:
        """Copy what was read to where it belongs: bits, never cast."""
        with torch.no_grad():
            for part, read in zip(self.parts, self.read, strict=True):
                if part.is_conj() or part.is_neg():
                    part.copy_(read)
                else:
                    as_words(part).copy_(as_words(read))

    def is_there(self) -> bool:
        """Say whether the parts hold what was read."""
        return all(
            torch.equal(as_words(part.resolve_conj().resolve_neg()).cpu(), as_words(read))
            for part, read in zip(self.parts, self.read, strict=True)
        )


def aliases_memory(tensors: Sequence[Sequence[torch.Tensor]]) -> frozenset[int]:
    """Return the numbers of the tensors, given by their parts, that may share a byte with another.

    Strided views that only interleave are among them.
    """
    if _are_apart([part for parts in tensors for part in parts]):
        return frozenset()
    reaches = sorted(
        (device, start, stop, number)
        for number, parts in enumerate(tensors)
        for device, (start, stop) in _reach(parts).items()
    )
    found: set[int] = set()
    last = ("", 0, 0, -1)  # the one that reaches farthest so far
    for reach in reaches:
        if reach[0] == last[0] and reach[1] < last[2]:
            found |= {reach[3], last[3]}
        if reach[0] != last[0] or reach[2] > last[2]:
            last = reach
    return frozenset(found)


def copy_to_aliases(landings: Sequence[AliasStaging]) -> None:
    """Put everything in place. Raises IncompatibleError where what was saved does not agree."""
    for landing in landings:
        landing.put()
    for landing in landings:
        if not landing.is_there():
            other = next(other for other in landings if _undoes(other, landing))
            raise IncompatibleError(
                f"{landing.name} and {other.name} share memory in the state, but were saved with "
                "values that differ there, so the state cannot hold both: give one of them memory "
                "of its own (untie them, or `clone()`), or exclude one, and load again"
            )


def _undoes(other: AliasStaging, landing: AliasStaging) -> bool:
    landing.put()
    other.put()
    return not landing.is_there()


def _are_apart(parts: Sequence[torch.Tensor]) -> bool:
    """Say at little cost whether surely no two parts share a byte; they rarely do."""
    if not all(part.is_cpu and part.is_contiguous() for part in parts):
        return False
    starts = [part.data_ptr() for part in parts]
    # Where the next one begins, as many have ended as have begun before it.
    stops = sorted(map(add, starts, [part.nbytes for part in parts]))
    starts.sort()
    return all(map(le, stops, islice(starts, 1, None)))


def _reach(parts: Sequence[torch.Tensor]) -> dict[str, tuple[int, int]]:
    """Return from which address to which the parts lie, on each device."""
    reach: dict[str, tuple[int, int]] = {}
    for part in parts:
        if numel := part.numel():
            if not part.is_contiguous():
                dims = zip(part.shape, part.stride(), strict=True)
                numel = 1 + sum((size - 1) * stride for size, stride in dims)
            start = part.data_ptr()
            stop = start + numel * part.itemsize
            device = _name(part.device)
            known = reach.get(device, (start, stop))
            reach[device] = min(start, known[0]), max(stop, known[1])
    return reach


_name = lru_cache(maxsize=64)(str)
