"""The policy of when a run saves, a value: `dc.every(steps=500) | dc.every(minutes=30)`."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from dist_ckpt.core.runtime.arguments import LEAST_POSITIVE, check_number, check_whole
from dist_ckpt.runs.policy_text import text_of

# These cannot be caught, or are not requests: after them the process is damaged.
_UNUSABLE_SIGNALS = frozenset({"KILL", "STOP", "SEGV", "BUS", "FPE", "ILL", "ABRT", "CHLD"})

# Longer than any run, and exact as a float.
_MAX_MINUTES = 1e9


@dataclass(frozen=True, slots=True)
class SavePolicy:
    """When a run saves. `|` joins two policies: the run saves when either is due.

    `steps` are intervals in optimizer steps, `seconds` intervals of time, `at` single steps.
    """

    steps: frozenset[int] = frozenset()
    seconds: frozenset[float] = frozenset()
    at: frozenset[int] = frozenset()
    at_end: bool = False
    signals: frozenset[str] = frozenset()

    def __or__(self, other: object) -> SavePolicy:
        if not isinstance(other, SavePolicy):
            return NotImplemented
        return SavePolicy(
            self.steps | other.steps,
            self.seconds | other.seconds,
            self.at | other.at,
            self.at_end or other.at_end,
            self.signals | other.signals,
        )

    def is_due(self, step: int, last: int) -> bool:
        """Return True if a save is due at a step. `last` is the last step begun or restored.

        A passed multiple counts: after a resume, exact multiples may never come.
        """
        return any(step // every > last // every for every in self.steps) or any(
            last < at <= step for at in self.at
        )

    def is_time(self, waited_s: float) -> bool:
        """Return True if a save is due this long after the last one, or after the start."""
        return any(waited_s >= every for every in self.seconds)

    def __str__(self) -> str:
        """Return the text form. Equal policies have the same text."""
        rules = [text_of("every", steps=every) for every in sorted(self.steps)]
        rules += [text_of("every", minutes=every / 60) for every in sorted(self.seconds)]
        rules += [text_of("at", *sorted(self.at))] * bool(self.at)
        rules += ["at_end"] * self.at_end
        rules += [text_of("on_signal", *sorted(self.signals))] * bool(self.signals)
        return " | ".join(rules)


def every(*, steps: int | None = None, minutes: float | None = None) -> SavePolicy:
    """Save at an interval of optimizer steps, or of minutes by rank 0's clock.

    By steps: when a multiple of `steps` was reached or passed since the last save or restore.
    """
    if (steps is None) == (minutes is None):
        raise TypeError("every(): give steps= or minutes=, and for both every(...) | every(...)")
    if steps is not None:
        return SavePolicy(steps=frozenset({check_whole("steps", steps, 1)}))
    wanted = f"a number above 0, up to {_MAX_MINUTES:g}"
    return SavePolicy(
        seconds=frozenset(
            {60 * check_number("minutes", minutes, wanted, LEAST_POSITIVE, _MAX_MINUTES)}
        )
    )


def at(*steps: int) -> SavePolicy:
    """Save at these steps."""
    if not steps:
        raise TypeError("at(): give the steps at which to save")
    return SavePolicy(at=frozenset(check_whole("at", step, 1) for step in steps))


at_end = SavePolicy(at_end=True)
"""Save at the end of the run."""


def on_signal(*names: str) -> SavePolicy:
    """Save, and stop in time, when any rank gets one of these signals: "TERM", "USR1"."""
    if not names:
        raise TypeError('on_signal(): give the signals, such as "TERM"')
    signals = set()
    for name in names:
        if type(name) is not str:
            raise TypeError(f'{name!r} is not the name of a signal: give it as "TERM"')
        short = name.upper().removeprefix("SIG")
        if f"SIG{short}" not in signal.Signals.__members__:
            raise ValueError(f"{name!r} is not a signal of this system")
        if short in _UNUSABLE_SIGNALS:
            raise ValueError(f"{name}: this signal cannot be a request to save; use TERM or USR1")
        signals.add(short)
    return SavePolicy(signals=frozenset(signals))


DEFAULT_SAVE = every(minutes=30) | at_end | on_signal("TERM")
