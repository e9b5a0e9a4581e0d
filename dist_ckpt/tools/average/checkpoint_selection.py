"""Check the options of `dc.average`, choose its checkpoints, and compute their weights."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import frexp, fsum, ldexp, nextafter

from dist_ckpt.core.commit import attempts
from dist_ckpt.core.commit.records.leases import leased
from dist_ckpt.core.commit.records.record_store import can_keep_records, can_lease
from dist_ckpt.core.format.filenames import Attempt
from dist_ckpt.core.format.index.index import Index
from dist_ckpt.core.planning.name_selection import parse_selection
from dist_ckpt.core.runtime.arguments import LEAST_POSITIVE, check_flag, check_number
from dist_ckpt.core.storage import Storage, real_path
from dist_ckpt.errors import StorageError
from dist_ckpt.runs import selectors
from dist_ckpt.runs.listing import Listing, RunCheckpoint, list_run
from dist_ckpt.tools.new_files import check_outside


@dataclass(frozen=True, slots=True, kw_only=True)
class AverageOptions:
    """The options of `average`. Call `check` in an exchange: an error then reaches all ranks."""

    last: int | None = None
    best: int | None = None
    min: str | None = None
    max: str | None = None
    weights: Sequence[float] | None = None
    decay: float | None = None
    include: str | Sequence[str] | None = None
    exclude: str | Sequence[str] | None = None
    overwrite: bool = False

    def check(self, *, is_run: bool) -> None:
        """Raise TypeError or ValueError for bad options. `is_run`: the source is a run's folder."""
        self._check_count(is_run=is_run)
        self._check_metric()
        self._check_weights()
        parse_selection(self.include, self.exclude)
        check_flag("overwrite", self.overwrite)

    def _check_count(self, *, is_run: bool) -> None:
        if not is_run and (self.last is not None or self.best is not None):
            raise ValueError("last= and best= select from one run: give its folder, not a list")
        if is_run and (self.last is None) == (self.best is None):
            raise ValueError(
                "one source is a run: give last=n or best=n (n <= 0 for all), or give a list of "
                "checkpoints"
            )
        for name, value in (("last", self.last), ("best", self.best)):
            if value is not None and type(value) is not int:
                raise TypeError(f"{name}={value!r}: give a whole number, 0 for all")

    def _check_metric(self) -> None:
        if self.best is None and (self.min is not None or self.max is not None):
            raise ValueError("min= and max= need best=: give best=n too")
        if self.best is None:
            return
        if (self.min is None) == (self.max is None):
            raise ValueError('best= needs a metric: give min="val/loss" or max="accuracy"')
        name = self.max if self.min is None else self.min
        if not isinstance(name, str) or not name:
            raise TypeError(f"{name!r} is not the name of a metric: give a text")

    def _check_weights(self) -> None:
        if self.weights is not None and self.decay is not None:
            raise ValueError("give either weights= or decay=")
        if self.decay is not None:
            wanted = "a number above 0 and below 1, or leave it out for a uniform average"
            check_number("decay", self.decay, wanted, LEAST_POSITIVE, nextafter(1, 0))
        if self.weights is None:
            return
        if isinstance(self.weights, str) or not isinstance(self.weights, Sequence):
            raise TypeError(f"weights={self.weights!r}: give a list of numbers")
        for weight in self.weights:
            check_number("weights", weight, "finite numbers", -sys.float_info.max)
        if fsum(_scale_weights(self.weights)) == 0:
            raise ValueError("the weights sum to 0: give others")


def _scale_weights(weights: Sequence[float]) -> tuple[float, ...]:
    """Scale by a power of two: the largest is then from 1 to 2, and float32 can add them."""
    exponent = frexp(max((abs(weight) for weight in weights), default=1))[1] - 1
    return tuple(ldexp(weight, -exponent) for weight in weights)


def compute_weights(options: AverageOptions, count: int) -> tuple[float, ...]:
    """Return the weights of `count` checkpoints.

    `weights` stay in the order of the caller. The weights by `decay` are oldest first. Raises
    ValueError for a wrong number of `weights`.
    """
    if options.decay is not None:
        return tuple(options.decay**age for age in reversed(range(count)))
    if options.weights is None:
        return (1.0,) * count
    if len(options.weights) != count:
        raise ValueError(
            f"{len(options.weights)} weights for {count} checkpoints: give one for each"
        )
    return _scale_weights(options.weights)


_log = logging.getLogger("dist_ckpt")


@dataclass(frozen=True, slots=True)
class AverageSource:
    """A checkpoint to average, with its weight."""

    storage: Storage
    path: str
    attempt: Attempt
    index: Index
    weight: float

    def __str__(self) -> str:
        """Return the text for the index of the average."""
        step = "" if self.index.step is None else f" of step {self.index.step}"
        return f"weight {self.weight:.6g}: {self.path.rpartition('/')[2]}/{self.attempt}{step}"


def choose_sources(
    sources: Sequence[tuple[Storage, str]],
    target: tuple[Storage, str],
    options: AverageOptions,
    leases: ExitStack | None,
    *,
    is_run: bool,
) -> tuple[AverageSource, ...]:
    """Return the checkpoints to average, oldest first.

    Checkpoints of a run are leased until `leases` is closed. If `leases` is None, nothing is
    leased, so nothing is written. The order is by step. Equal steps, or all if one has no step, are
    ordered by the time of the save. Raises ValueError for a bad `target`.
    """
    if is_run:
        ((storage, root),) = sources
        paths = [(storage, path) for path in _choose_from_run(storage, root, options, leases)]
    else:
        paths = [
            (storage, selectors.resolve_with_lease(storage, path, leases))
            for storage, path in sources
        ]
    opened = [(storage, path, *attempts.find_checkpoint(storage, path)) for storage, path in paths]
    _check_distinct([(path, attempt) for _, path, attempt, _ in opened])
    have_steps = all(index.step is not None for *_, index in opened)

    def sort_key(number: int) -> tuple[int, float]:
        index = opened[number][-1]
        return (index.step or 0) if have_steps else 0, index.saved_at

    order = sorted(range(len(opened)), key=sort_key)
    weights = compute_weights(options, len(opened))
    chosen = tuple(
        AverageSource(*opened[number], weights[number if options.decay is None else position])
        for position, number in enumerate(order)
    )
    _check_target(chosen, *target, sources[0][1] if is_run else None)
    return chosen


def lease_sources(chosen: Sequence[AverageSource], stack: ExitStack) -> None:
    """Lease the sources of a plan until `stack` is closed. NotFoundError if one was removed."""
    for source in chosen:
        try:
            stack.enter_context(leased(source.storage, source.path, source.attempt, source.index))
        except StorageError as error:
            _log.debug("%s is not leased: %s", source.path, error)


def _check_distinct(sources: Sequence[tuple[str, Attempt]]) -> None:
    if len(sources) < 2:
        only = f"only {sources[0][0]}" if sources else "nothing"
        raise ValueError(f"there is {only} to average: give two checkpoints or more")
    seen: set[tuple[str, Attempt]] = set()
    for path, attempt in sources:
        if (source := (real_path(path), attempt)) in seen:
            raise ValueError(f"{path} is given twice: give it once, with a weight if need be")
        seen.add(source)


def _check_target(
    chosen: Sequence[AverageSource], storage: Storage, target: str, root: str | None
) -> None:
    """Raise ValueError for a target that harms a source, or looks like a checkpoint of a run.

    `root` is the folder of the run from which the sources were chosen, if any.
    """
    real = real_path(target)
    for source in chosen:
        real_source = real_path(source.path)
        check_outside(real_source, real)
        if real_source.startswith(f"{real}/"):
            raise ValueError(
                f"the source {source.path} is inside the target {target}: give another"
            )
    parent = real.rpartition("/")[0] or "/"
    if (root is not None and real_path(root) == parent) or can_keep_records(storage, parent):
        raise ValueError(
            f"the target {target} is in the folder of a run, which would resume from the average: "
            f"give a target outside of {parent}"
        )


def _choose_from_run(
    storage: Storage, root: str, options: AverageOptions, leases: ExitStack | None
) -> Sequence[str]:
    """Return the paths of the chosen checkpoints, leased if possible."""

    def choose() -> Sequence[RunCheckpoint]:
        return pick_checkpoints(list_run(storage, root, now=time.time()), options)

    chosen: Sequence[RunCheckpoint] = ()
    if leases is not None and can_lease(storage, root):
        try:
            chosen = selectors.lease_selected(storage, choose, leases)
        except StorageError as error:
            _log.debug("%s: the sources are not leased: %s", root, error)
    return [checkpoint.path for checkpoint in chosen or choose()]


def pick_checkpoints(listing: Listing, options: AverageOptions) -> Sequence[RunCheckpoint]:
    """Return the last or the best checkpoints of a run. Pure, except for log messages.

    Only the highest attempt of each step counts. NotFoundError if no checkpoint has the metric.
    """
    selectors.warn_of_unreadable(listing)
    name = options.max if options.min is None else options.min
    if options.best is None or name is None:
        count, candidates = options.last or 0, listing.usable
    else:
        count, candidates = options.best, tuple(selectors.measured(listing, name))
    ranked = list({info.step: info for info in candidates}.values())[::-1]
    if name is not None:
        sign = -1 if options.min is None else 1
        # The older of two equal values is better, as for `keep.best`.
        ranked.reverse()
        ranked.sort(key=lambda info: sign * info.metrics[name])
    picked = ranked[:count] if count > 0 else ranked
    if len(picked) < count:
        _log.warning("%s: %d checkpoints are averaged, not %d", listing.root, len(picked), count)
    return sorted(picked, key=lambda info: info.step or 0)
