"""What a scenario is and what comes out of it: plain values that say nothing about how.

A `Scenario` has a name and a function that measures and yields one `Measure` at a time. A measure
is one table: the same work done by several contenders, a row each. A row is a `Figure`, or an
`Absent` that says why there is no figure; no contender is left out in silence.

To add scenarios, write a module with a function `scenarios() -> list[Scenario]` and name it in
`python -m benchmarks`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

OURS = "dist_ckpt"

MAX_REASON_CHARS = 160


class DifferentError(Exception):
    """What came back is not what was put in. There is no figure for such data."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What the command line asks for.

    `folder` is empty, exists, lies on the disk to be measured, and is removed at the end. `rounds`
    are measured; one more, before them, is not. `nbytes` is the size of the large state; a
    scenario may take a fraction of it. `num_small` is how many tensors the small state has.
    `contenders` restricts who takes part; None: all. `actions` restricts what is measured, by the
    names of measures; None: everything. `deadline_s` is for any single step of a child process.
    `quick` asks for the smallest run that still shows everything.
    """

    folder: Path
    rounds: int = 5
    nbytes: int = 1 << 30
    num_small: int = 5000
    quick: bool = False
    contenders: tuple[str, ...] | None = None
    actions: tuple[str, ...] | None = None
    deadline_s: float = 300.0

    def takes(self, contender: str) -> bool:
        """Return whether a contender takes part. Ours always does."""
        return self.contenders is None or contender in (OURS, *self.contenders)

    def measures(self, action: str) -> bool:
        """Return whether an action is asked for."""
        return self.actions is None or action in self.actions


@dataclass(frozen=True, slots=True)
class Figure:
    """What one contender took, in each measured round; of several ranks, the slowest one.

    `facts` are further numbers of this row; each name becomes a column, with its unit.
    `note` says what a reader must know to compare fairly.
    """

    contender: str
    seconds: tuple[float, ...]
    facts: Mapping[str, float] = field(default_factory=dict)
    note: str = ""

    @property
    def median_s(self) -> float:
        """The median of the rounds."""
        return statistics.median(self.seconds)


@dataclass(frozen=True, slots=True)
class Absent:
    """Why a contender has no figure."""

    contender: str
    reason: str


Row = Figure | Absent


@dataclass(frozen=True, slots=True)
class Measure:
    """One table. `name` is unique in its scenario; `title` says to a reader what was done.

    `nbytes` is what was moved, for GB/s; None where that means nothing. `limits` are the names of
    rows that are not contenders but limits of the hardware, the decisive one first: all others are
    shown as a ratio to it. `note` stands under the table.
    """

    scenario: str
    name: str
    title: str
    rows: tuple[Row, ...]
    nbytes: int | None = None
    limits: tuple[str, ...] = ()
    note: str = ""

    def figure(self, contender: str) -> Figure | None:
        """Return a contender's figure, if it has one."""
        for row in self.rows:
            if row.contender == contender and isinstance(row, Figure):
                return row
        return None


@dataclass(frozen=True, slots=True)
class Scenario:
    """Something worth measuring. `what` is one line for --list."""

    name: str
    what: str
    run: Callable[[Settings], Iterator[Measure]]


def in_one_line(reason: str) -> str:
    """Return a reason as it fits into a table."""
    return " ".join(reason.split())[:MAX_REASON_CHARS]


def turns(names: Sequence[str], rounds: int) -> Iterator[tuple[int, str]]:
    """Yield (round, name): everybody once a round, and each round begins with another one.

    Round 0 is a warm-up that nobody measures; `rounds` more follow. So whatever disturbs the
    machine meanwhile meets all contenders alike.
    """
    for number in range(rounds + 1):
        first = number % len(names) if names else 0
        for name in (*names[first:], *names[:first]):
            yield number, name
