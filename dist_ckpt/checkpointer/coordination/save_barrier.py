"""The line: how ranks agree on a boundary at which all save, while none waits when nothing is due.

A boundary is each `step()` or `poll()` of the training; all ranks make the same sequence of them.
Whoever wants a save that no step policy calls for opens a round, by one note that all can read:

1. A thread of each rank sees the note. It draws a line before a boundary that its rank has not
   passed, and only then answers with that boundary's number.
2. With all answers rank 0 puts the verdict "go k", k being the highest of them. So no rank has
   passed k, nor will before it knows the verdict.
3. A rank that comes to its line waits for the verdict, and saves at k. Any rank may put the verdict
   "void" instead, at any time: the first verdict stands. Then there is no line, and who asked asks
   again.

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
    does not pass in this round, None while none is open. `is_go`: the verdict is known, and `first`
    is where all save.
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

        A line that lies further ahead is reached after the verdict, mostly, and stops nobody.
        """
        if self.first is None:
            self.first = self.passed + 1 + lookahead
        return self.first

    def learn(self, verdict: int | None) -> None:
        """Take a verdict: the boundary at which all save, or None if the round is void."""
        if verdict is None:
            self._next_round()
            return
        if self.first is None or verdict < self.first:
            raise AssertionError(f"the verdict is {verdict}, and the answer was {self.first}")
        self.first, self.is_go = verdict, True

    def _next_round(self) -> None:
        self.first, self.is_go = None, False
        self.round += 1
