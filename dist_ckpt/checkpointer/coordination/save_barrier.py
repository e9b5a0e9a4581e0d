"""The save barrier: ranks agree on a boundary at which all save, and wait only if a save is due.

A boundary is each `step()` or `poll()` of the training; all ranks make the same sequence of them.
A rank that needs a save outside the step policy opens a round, by one note that all can read:

1. A thread of each rank sees the note. It draws a line before a boundary that its rank has not
   passed, and only then answers with that boundary's number.
2. With all answers rank 0 writes the decision "go k"; k is the highest of them. So no rank has
   passed k, nor will before it has the decision.
3. A rank at its line waits for the decision, and saves at k. Any rank may write the decision "void"
   instead, at any time: the first decision counts. Then there is no line, and the rank that opened
   the round opens another.

So a rank at its line waits only for the threads of others, which answer whatever their training
does. Other orders split the ranks or stop them for ever: decision 15 has them, and
`tests/checkpointer/test_save_barrier_model.py` finds them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Arrival = Literal["pass", "wait", "save"]


@dataclass(slots=True)
class SaveBarrier:
    """One rank's side, to be used under a lock.

    Boundaries and rounds are counted from 1. `passed` is how many boundaries this rank has passed;
    `round` is the round that is open here, or will be next; `first` is the first boundary that it
    does not pass in this round, None while none is open. `is_go`: the decision is known, and all
    save at `first`.
    """

    passed: int = 0
    round: int = 1
    first: int | None = None
    is_go: bool = False

    def arrive(self) -> Arrival:
        """Come to the next boundary: pass it, wait (and ask again), or save there and be past it.

        Who saves is in the next round: it may be answered while the save is under way.
        """
        boundary = self.passed + 1
        if self.first is None or boundary < self.first:
            self.passed = boundary
            return "pass"
        if not self.is_go:
            return "wait"
        self.passed = boundary
        self._next_round()
        return "save"

    def draw(self, lookahead: int) -> int:
        """Draw the line of this round, so many boundaries ahead; return the boundary to answer.

        A line that lies further ahead is reached after the decision, mostly, and stops nobody.
        """
        if self.first is None:
            self.first = self.passed + 1 + lookahead
        return self.first

    def learn(self, decision: int | None) -> None:
        """Take a decision: the boundary at which all save, or None if the round is void."""
        if decision is None:
            self._next_round()
            return
        if self.first is None or decision < self.first:
            raise AssertionError(f"the decision is {decision}, and the answer was {self.first}")
        self.first, self.is_go = decision, True

    def _next_round(self) -> None:
        self.first, self.is_go = None, False
        self.round += 1
