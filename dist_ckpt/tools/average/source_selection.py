"""The options of `dc.average`, the checkpoints that they choose, and the weights of these."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import frexp, fsum, ldexp

from dist_ckpt.core.commit import attempts
from dist_ckpt.core.commit.records.leases import leased, renewed_lease
from dist_ckpt.core.commit.records.record_store import can_keep_records, can_lease
from dist_ckpt.core.format.filenames import Attempt
from dist_ckpt.core.format.index.index import Index
from dist_ckpt.core.planning.selection import selection_of
from dist_ckpt.core.storage import Storage, real_path
from dist_ckpt.errors import NotFoundError, StorageError
from dist_ckpt.runs.listing import Listing, RunCheckpoint, list_run
from dist_ckpt.runs.selectors import (
    checkpoint_ref_of,
    measured,
    resolve_at,
    resolve_with_lease,
    warn_of_unreadable,
)

_MOST = sys.float_info.max


@dataclass(frozen=True, slots=True, kw_only=True)
class AverageOptions:
    """The options of `average`, checked by `check` once a rank's error can reach the others."""

    last: int | None = None
    best: int | None = None
    min: str | None = None
    max: str | None = None
    weights: Sequence[float] | None = None
    decay: float | None = None
    include: str | Sequence[str] | None = None
    exclude: str | Sequence[str] | None = None
    overwrite: bool = False

    def check(self, *, of_run: bool) -> None:
        """Raise TypeError or ValueError for options that make no sense."""
        self._check_count(of_run=of_run)
        self._check_metric()
        self._check_weights()
        selection_of(self.include, self.exclude)
        if type(self.overwrite) is not bool:
            raise TypeError(f"overwrite={self.overwrite!r}: give True or False")

    def _check_count(self, *, of_run: bool) -> None:
        if not of_run and (self.last is not None or self.best is not None):
            raise ValueError("last= and best= choose of a run: give its folder, not a list")
        if of_run and (self.last is None) == (self.best is None):
            raise ValueError(
                "of a run give either last=n or best=n (n <= 0 for all), else a list of checkpoints"
            )
        for name, value in (("last", self.last), ("best", self.best)):
            if value is not None and type(value) is not int:
                raise TypeError(f"{name}={value!r}: give a whole number, 0 for all")

    def _check_metric(self) -> None:
        if self.best is None and (self.min is not None or self.max is not None):
            raise ValueError("min= and max= say which are the best: give best=n too")
        if self.best is None:
            return
        if (self.min is None) == (self.max is None):
            raise ValueError('best=: say which is best, min="val/loss" or max="accuracy"')
        name = self.max if self.min is None else self.min
        if not isinstance(name, str) or not name:
            raise TypeError(f"{name!r} is no name of a metric")

    def _check_weights(self) -> None:
        if self.weights is not None and self.decay is not None:
            raise ValueError("give either weights= or decay=")
        if self.decay is not None:
            _check_number(self.decay, "decay")
            if not 0 < self.decay < 1:
                raise ValueError(
                    f"decay={self.decay}: give a number above 0 and below 1, nothing for a "
                    f"uniform average"
                )
        if self.weights is None:
            return
        if isinstance(self.weights, str) or not isinstance(self.weights, Sequence):
            raise TypeError(f"weights={self.weights!r}: give a list of numbers")
        for weight in self.weights:
            _check_number(weight, "weights")
        if fsum(_scaled(self.weights)) == 0:
            raise ValueError("the weights sum to 0: give others")


def _check_number(value: object, name: str) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{name}: {value!r} is no number")
    if not -_MOST <= value <= _MOST:
        raise ValueError(f"{name} has {value}: give finite numbers")


def _scaled(weights: Sequence[float]) -> tuple[float, ...]:
    """Scale by a power of two, so that the largest is from 1 to 2: float32 can add them up then."""
    exponent = frexp(max((abs(weight) for weight in weights), default=1))[1] - 1
    return tuple(ldexp(weight, -exponent) for weight in weights)


def weights_of(options: AverageOptions, count: int) -> tuple[float, ...]:
    """Return the weight of each of so many checkpoints.

    `weights` are in the order in which they were given; those of a `decay` are for the oldest
    first. ValueError if the number does not fit.
    """
    if options.decay is not None:
        return tuple(options.decay**age for age in reversed(range(count)))
    if options.weights is None:
        return (1.0,) * count
    if len(options.weights) != count:
        raise ValueError(
            f"{len(options.weights)} weights for {count} checkpoints: give one for each"
        )
    return _scaled(options.weights)


# --- the checkpoints: those of a list, or the last or best of a run ---------------------------


_log = logging.getLogger("dist_ckpt")

# How often what was chosen may be removed before it is leased.
_ROUNDS = 16


@dataclass(frozen=True, slots=True)
class AverageSources:
    """One checkpoint that is averaged, and its weight."""

    storage: Storage
    path: str
    attempt: Attempt
    index: Index
    weight: float

    @property
    def folder(self) -> str:
        """Its attempt's folder."""
        return f"{self.path}/{self.attempt}"

    def __str__(self) -> str:
        """Return it for the index of the average."""
        step = "" if self.index.step is None else f" of step {self.index.step}"
        return f"{self.weight:.6g} of {self.path.rpartition('/')[2]}/{self.attempt}{step}"


def choose(
    sources: Sequence[tuple[Storage, str]],
    options: AverageOptions,
    held: ExitStack | None,
    *,
    of_run: bool,
) -> tuple[AverageSources, ...]:
    """Find the checkpoints to average, oldest first; of a run they are leased until `held` ends.

    With None they are not leased, and nothing is written.

    The newest is of the highest step; of one step, or if one of them has none, the last that was
    saved.
    """
    if of_run:
        ((storage, root),) = sources
        there = [(storage, path) for path in _of_run(storage, root, options, held)]
    else:
        there = [(storage, _resolved(storage, path, held)) for storage, path in sources]
    found = [(storage, path, *attempts.find(storage, path)) for storage, path in there]
    _check_distinct([(path, attempt) for _, path, attempt, _ in found])
    have_steps = all(index.step is not None for *_, index in found)

    def age(number: int) -> tuple[int, float]:
        index = found[number][-1]
        return (index.step or 0) if have_steps else 0, index.saved_at

    order = sorted(range(len(found)), key=age)
    weights = weights_of(options, len(found))
    return tuple(
        AverageSources(*found[number], weights[number if options.decay is None else place])
        for place, number in enumerate(order)
    )


def lease_sources(chosen: Sequence[AverageSources], stack: ExitStack) -> None:
    """Lease the sources of a plan until the stack ends. NotFoundError if one was removed."""
    for source in chosen:
        try:
            stack.enter_context(leased(source.storage, source.path, source.attempt, source.index))
        except StorageError as error:
            _log.debug("%s is not leased: %s", source.path, error)


def _check_distinct(found: Sequence[tuple[str, Attempt]]) -> None:
    if len(found) < 2:
        there = f"only {found[0][0]}" if found else "nothing"
        raise ValueError(f"there is {there} to average: give two checkpoints or more")
    seen: set[tuple[str, Attempt]] = set()
    for path, attempt in found:
        if (place := (real_path(path), attempt)) in seen:
            raise ValueError(f"{path} is given twice: give it once, with a weight if need be")
        seen.add(place)


def check_target(
    chosen: Sequence[AverageSources], storage: Storage, target: str, root: str | None
) -> None:
    """Raise ValueError if a target would harm a source, or be taken for a part of a run.

    `root` is the run's, if the sources were chosen of one.
    """
    real = real_path(target)
    for one in chosen:
        source = real_path(one.path)
        if real == source:
            raise ValueError(f"the target {target} is a source: give another target")
        if real.startswith(f"{source}/"):
            raise ValueError(f"the target {target} lies in the source {one.path}: give another")
        if source.startswith(f"{real}/"):
            raise ValueError(f"the source {one.path} lies in the target {target}: give another")
    parent = real.rpartition("/")[0] or "/"
    if (root is not None and real_path(root) == parent) or can_keep_records(storage, parent):
        raise ValueError(
            f"the target {target} lies in the folder of a run, which would go on from it as from "
            f"its own: give a target outside of {parent}"
        )


def _resolved(storage: Storage, path: str, held: ExitStack | None) -> str:
    if held is not None:
        return resolve_with_lease(storage, path, held)
    found = resolve_at(storage, path)
    return path if found is None else found.path


def _of_run(
    storage: Storage, root: str, options: AverageOptions, held: ExitStack | None
) -> Sequence[str]:
    """Choose of a run, and lease; again if one of them is removed in between."""
    for left in reversed(range(_ROUNDS)):
        listing = list_run(storage, root, now=time.time())
        those = pick(listing, options)
        try:
            with ExitStack() as stack:
                if held is not None and can_lease(storage, listing.root):
                    for one in those:
                        stack.enter_context(renewed_lease(checkpoint_ref_of(storage, one)))
                    held.push(stack.pop_all())
        except NotFoundError:
            if not left:
                raise
            continue
        except StorageError as error:
            _log.debug("%s: the sources are not leased: %s", root, error)
        return [one.path for one in those]
    raise AssertionError


def pick(listing: Listing, options: AverageOptions) -> Sequence[RunCheckpoint]:
    """Return the last or the best of a run. Pure, but for a log.

    Of one step only the highest attempt counts. NotFoundError if nothing is measured.
    """
    warn_of_unreadable(listing)
    name = options.max if options.min is None else options.min
    if options.best is None or name is None:
        count, there = options.last or 0, listing.alive
    else:
        count, there = options.best, tuple(measured(listing, name))
    ranked = list({one.step: one for one in there}.values())[::-1]
    if name is not None:
        sign = -1 if options.min is None else 1
        # Of two that are equal the older is the better, as for `keep.best`.
        ranked.reverse()
        ranked.sort(key=lambda one: sign * one.metrics[name])
    found = ranked[:count] if count > 0 else ranked
    if len(found) < count:
        _log.warning("%s: %d checkpoints are averaged, not %d", listing.root, len(found), count)
    return sorted(found, key=lambda one: one.step or 0)
