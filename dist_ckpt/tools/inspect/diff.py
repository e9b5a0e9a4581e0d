"""`dc.diff`: compare two checkpoints, without torch or ranks."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite, prod
from typing import TYPE_CHECKING

from dist_ckpt.core.checkpoint.checkpoint import Checkpoint
from dist_ckpt.core.checkpoint.open_checkpoint import WINDOW_NBYTES, OpenCheckpoint, iterate_parts
from dist_ckpt.core.format.dtypes import DTYPES
from dist_ckpt.core.format.index.index import TensorRecord
from dist_ckpt.core.format.index.model_description import (
    KIND,
    find_differences,
    find_stored_differences,
)
from dist_ckpt.core.planning.name_selection import Selection, parse_selection
from dist_ckpt.core.runtime.arguments import check_flag, check_number
from dist_ckpt.core.shard_io.memory.host_array import has_numbers, numbers, numpy_module
from dist_ckpt.default_opener import OPENER
from dist_ckpt.reports import CopyProgress, Progress

if TYPE_CHECKING:
    import numpy as np

_CHUNK_NUMEL = 1 << 20


@dataclass(frozen=True, slots=True)
class ObjectDifference:
    """A tensor whose values differ: in `num_differing` elements, by at most `max_difference`.

    `max_difference` is None if a nan or an infinity differs from another value.
    """

    name: str
    num_differing: int
    numel: int
    max_difference: float | None


@dataclass(frozen=True, slots=True)
class Difference:
    """The differences of the checkpoints `a` and `b`.

    `config` has the differing configuration values by dotted name, and `kind`, each as two texts.
    `removed` are tensors that only `a` has, `added` are tensors that only `b` has. `changed` are
    tensors whose dtype or shape differs, each with two texts. `objects` are the plain values that
    differ, each with two texts.

    `num_tensors` is the number of tensors that both have with one dtype and shape. `values` are
    those whose values differ; None if only digests were compared. Then `digests` are those whose
    digests differ, and digests cannot compare those in `not_compared`.
    """

    a: str
    b: str
    config: Mapping[str, tuple[str, str]]
    removed: tuple[str, ...]
    added: tuple[str, ...]
    changed: Mapping[str, tuple[str, str]]
    objects: Mapping[str, tuple[str, str]]
    num_tensors: int
    values: tuple[ObjectDifference, ...] | None = None
    digests: tuple[str, ...] | None = None
    not_compared: tuple[str, ...] = ()

    @property
    def same(self) -> bool:
        """True if nothing differs in the compared parts. See also `not_compared`."""
        parts = (self.config, self.removed, self.added, self.changed, self.objects)
        return not any((*parts, self.values, self.digests))


# The absolute and the relative tolerance between two values; None if the bits must be equal.
_Tolerance = tuple[float, float] | None


def diff(  # noqa: PLR0913 - the names, the parts, and the tolerances
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    values: bool = False,
    rtol: float | None = None,
    atol: float | None = None,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    progress: Progress | None = None,
) -> Difference:
    """Compare the checkpoints `a` and `b`: configurations, names, dtypes, shapes, plain values.

    Tensors are compared by the digests that both store. That reads no tensor. It needs one layout
    and block size, and fails for files of other systems: such tensors are in `not_compared`.

    With `values` all values are read and compared, a window of each checkpoint at a time. They are
    compared bit for bit, so nan equals nan, and 0.0 differs from -0.0. With `rtol` or `atol`,
    numbers are equal if they differ by at most `atol + rtol * abs(b)`. The layouts may differ.
    Plain values are compared exactly: 1 differs from 1.0 and True, a list from a tuple, and the key
    1 from "1". The order of a dict does not count. A configuration is compared more loosely: there
    a tuple is like a list. Step, metadata, attached files and per-rank values are not
    compared.

    `include` and `exclude` are as for `dc.save`. Values need numpy, but not torch. One process
    calls this. It changes nothing. Raises ValueError for a tolerance without `values`, and for a
    pattern that matches no name in `a` and `b`. Raises CorruptError for damaged blocks, and the
    errors of `dc.open`.
    """
    tolerance = _check_tolerance(rtol, atol, values=values)
    selection = parse_selection(include, exclude)
    with _open(a) as left, _open(b) as right:
        first, second = (Checkpoint(i.storage, i.path, i.attempt, i.index) for i in (left, right))
        names = _select(left, right, selection, {**first.objects, **second.objects})
        config = find_differences(first.config or {}, second.config or {})
        if first.kind != second.kind:
            config[KIND] = (repr(first.kind), repr(second.kind))
        objects_of_each = (
            {name: value for name, value in each.objects.items() if name in selection}
            for each in (first, second)
        )
        pairs = {name: (names[0][name], names[1][name]) for name in names[0] if name in names[1]}
        changed = _find_changed(left, right, pairs)
        same = {name: pair for name, pair in pairs.items() if name not in changed}
        difference = Difference(
            a=left.path,
            b=right.path,
            config=config,
            removed=tuple(name for name in names[0] if name not in pairs),
            added=tuple(name for name in names[1] if name not in pairs),
            changed=changed,
            objects=find_stored_differences(*objects_of_each),
            num_tensors=len(same),
        )
        if values:
            found = tuple(_diff_values(left, right, same, tolerance, progress))
            return replace(difference, values=found)
        digests, not_compared = _diff_digests(left, right, same)
        return replace(difference, digests=digests, not_compared=not_compared)


def _open(path: str | os.PathLike[str]) -> OpenCheckpoint:
    return OpenCheckpoint.open(path, opener=OPENER, direct_reads=True)


def _check_tolerance(rtol: float | None, atol: float | None, *, values: bool) -> _Tolerance:
    check_flag("values", values)
    if not values and (rtol is not None or atol is not None):
        raise ValueError("rtol and atol compare values: give values=True (--values) too")
    for name, value in (("rtol", rtol), ("atol", atol)):
        if value is not None:
            check_number(name, value, "a number from 0 on", 0)
    if values:
        numpy_module()  # before anything is read
    return None if rtol is None and atol is None else (atol or 0.0, rtol or 0.0)


def _select(
    left: OpenCheckpoint, right: OpenCheckpoint, selection: Selection, objects: Iterable[str]
) -> list[dict[str, str]]:
    """Return the selected tensors of both checkpoints: the names, with the stored names.

    Raises ValueError for a pattern that matches neither a tensor nor one of `objects`.
    """
    names = [
        {**{fqn: fqn for fqn in each.catalog.tensors}, **each.catalog.aliases}
        for each in (left, right)
    ]
    if problems := selection.pattern_problems({**names[0], **names[1], **dict.fromkeys(objects)}):
        raise ValueError("; ".join(problems))
    return [{name: fqn for name, fqn in each.items() if name in selection} for each in names]


def _find_changed(
    left: OpenCheckpoint, right: OpenCheckpoint, pairs: Mapping[str, tuple[str, str]]
) -> dict[str, tuple[str, str]]:
    """Return the dtypes and shapes of tensors that differ in them."""
    texts = {
        name: (
            _dtype_and_shape(left.catalog.tensors[a]),
            _dtype_and_shape(right.catalog.tensors[b]),
        )
        for name, (a, b) in pairs.items()
    }
    return {name: (a, b) for name, (a, b) in texts.items() if a != b}


def _dtype_and_shape(record: TensorRecord) -> str:
    return f"{record.dtype} {list(record.shape)}"


def _diff_digests(
    left: OpenCheckpoint, right: OpenCheckpoint, pairs: Mapping[str, tuple[str, str]]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of tensors whose digests differ, and of those that digests cannot compare.

    Equal cells have equal digests if each digest covers the same bytes.
    """
    if not (left.index.has_digests and right.index.has_digests):
        return (), tuple(pairs)
    a = left.block_digests({name for name, _ in pairs.values()})
    b = right.block_digests({name for _, name in pairs.values()})
    digests = {name: (a[pair[0]], b[pair[1]]) for name, pair in pairs.items()}
    return (
        tuple(name for name, (x, y) in digests.items() if x.keys() == y.keys() and x != y),
        tuple(name for name, (x, y) in digests.items() if x.keys() != y.keys()),
    )


def _diff_values(
    left: OpenCheckpoint,
    right: OpenCheckpoint,
    pairs: Mapping[str, tuple[str, str]],
    tolerance: _Tolerance,
    progress: Progress | None,
) -> Iterator[ObjectDifference]:
    """Yield the tensors that differ. Tied names share a pair, so it is compared once."""
    results = {pair: _PairDifference() for pair in pairs.values()}
    partners: dict[str, list[str]] = {}
    for left_name, right_name in results:
        partners.setdefault(left_name, []).append(right_name)
    names = set(partners)
    nbytes = left.tensor_nbytes(names)
    count_read = CopyProgress(nbytes, progress)
    memory = memoryview(bytearray(min(nbytes, WINDOW_NBYTES)))
    for window in left.stream(names, window_nbytes=WINDOW_NBYTES):
        parts = {want.fqn: (want, data) for want, data in window.parts}
        for group in _group_pairs(
            [(name, partner) for name in parts for partner in partners[name]]
        ):
            wanted = [parts[name][0]._replace(fqn=partner) for name, partner in group]
            right.read(wanted, memory)
            for pair, (want, data) in zip(group, iterate_parts(wanted, memory), strict=True):
                results[pair].compare(want.dtype, parts[pair[0]][1], data, tolerance)
        count_read(window.nbytes)
    for name, pair in pairs.items():
        if results[pair].num:
            numel = prod(left.catalog.tensors[pair[0]].shape)
            yield ObjectDifference(name, results[pair].num, numel, results[pair].distance)


def _group_pairs(pairs: Sequence[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    """Yield pairs in groups that have no name twice on one side. Usually there is one group."""
    while pairs:
        lefts, rights = set[str](), set[str]()
        group, later = [], []
        for left, right in pairs:
            if left in lefts or right in rights:
                later.append((left, right))
            else:
                group.append((left, right))
                lefts.add(left)
                rights.add(right)
        yield group
        pairs = later


class _PairDifference:
    """The differences of a pair of tensors so far.

    `distance` is None if it is not finite, or if the dtype has no numbers.
    """

    def __init__(self) -> None:
        self.num = 0
        self.distance: float | None = 0.0

    def compare(self, dtype: str, a: memoryview, b: memoryview, tolerance: _Tolerance) -> None:
        """Compare the same elements of both tensors."""
        step = _CHUNK_NUMEL * DTYPES[dtype].itemsize
        for start in range(0, a.nbytes, step):
            left, right = a[start : start + step], b[start : start + step]
            if bytes(left) != bytes(right):  # much faster than a comparison of memoryviews
                self._count_differences(dtype, left, right, tolerance)

    def _count_differences(
        self, dtype: str, a: memoryview, b: memoryview, tolerance: _Tolerance
    ) -> None:
        numpy = numpy_module()
        size = DTYPES[dtype].itemsize
        bits = [numpy.frombuffer(data, "u1").reshape(-1, size) for data in (a, b)]
        differ = (bits[0] != bits[1]).any(axis=1)
        if not has_numbers(dtype):
            self.num, self.distance = self.num + int(differ.sum()), None
            return
        left, right = (_widen(numbers(dtype, data)) for data in (a, b))
        if left.size != differ.size:  # two elements share a byte
            differ = left != right
        with numpy.errstate(all="ignore"):  # infinities, and nan
            distance = numpy.abs(left - right)
            if tolerance is not None:
                near = distance <= tolerance[0] + tolerance[1] * abs(right)
                # An infinity is equal only to itself, but the distance is nan.
                near &= numpy.isfinite(right)
                near |= (left == right) | (numpy.isnan(left) & numpy.isnan(right))
                differ &= ~near
        self.num += int(differ.sum())
        if differ.any() and self.distance is not None:
            most = float(distance[differ].max())
            self.distance = max(self.distance, most) if isfinite(most) else None


def _widen(values: np.ndarray) -> np.ndarray:
    """Convert numbers to floats that are wide enough for exact differences."""
    numpy = numpy_module()
    if values.dtype.kind == "c":
        return values.astype(numpy.clongdouble)
    return values.astype(numpy.longdouble if values.dtype.itemsize >= 8 else numpy.float64)
