"""The options of `dc.average`, and the weights that they come to."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from math import frexp, fsum, ldexp

from dist_ckpt.core.planning.selection import selection_of

_MOST = sys.float_info.max


@dataclass(frozen=True, slots=True)
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
