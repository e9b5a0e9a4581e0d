"""Requests to save or to end: of other processes (`dist-ckpt request-save`), and of this rank.

A separate thread of rank 0 polls for requests of other processes and answers them: the rounds must
not wait for the storage, and the maintenance may prune for minutes. It also writes the run's
heartbeat. `RankRequests` has the requests of this rank.

Signals that ask a run to save and to stop: a handler only sets a flag.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from dist_ckpt.checkpointer.coordination.barrier_rounds import BarrierProposal
from dist_ckpt.checkpointer.maintenance import MaintenanceThread
from dist_ckpt.checkpointer.save_policy import SavePolicy
from dist_ckpt.core.comm.exchange.channel import COORDINATOR
from dist_ckpt.core.commit.records.incarnations import (
    LIVENESS_INTERVAL_S,
    Incarnation,
    LivenessFile,
)
from dist_ckpt.core.commit.records.protections import Where
from dist_ckpt.core.format.filenames import answer_file, request_file
from dist_ckpt.core.format.run_records import Outcome, RequestRecord
from dist_ckpt.core.storage import Storage
from dist_ckpt.errors import CheckpointError, CorruptError, IncompatibleError
from dist_ckpt.runs.save_requests import (
    RequestNames,
    list_requests,
    put_answer,
    read_request,
    remove_file,
)


class Signals:
    """Handlers for some signals, from construction until `close`.

    `got` is what came first, and `got_at` when, by the monotonic clock.
    A handler that was there is called as well, but for Python's own for Ctrl-C. A forked child,
    such as a worker of a data loader, has what was there before. ValueError outside of the main
    thread, where no handler can be set.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.got: str | None = None
        self.got_at = 0.0
        self._is_over = False
        self._before: dict[int, Any] = {}
        names = tuple(names)
        if names and threading.current_thread() is not threading.main_thread():
            raise ValueError(
                "on_signal() needs the main thread, as only there a handler can be set: make the "
                "Checkpointer there, or leave on_signal() out"
            )
        _living.add(self)
        try:
            for name in names:
                number = signal.Signals[f"SIG{name}"]
                self._before[number] = signal.signal(number, self._handle)
        except BaseException:
            self.close()
            raise

    def forget(self) -> None:
        """Take what came as done."""
        self.got = None

    def close(self) -> None:
        """Put back the handlers that were there, unless others were set since."""
        for number, before in self._before.items():
            if signal.getsignal(number) == self._handle:
                # None: it was set by other means than Python's, and cannot be put back.
                signal.signal(number, signal.SIG_DFL if before is None else before)
        self._before = {}

    def let_go(self) -> None:
        """Close it, if this is the main thread; else what comes goes to who was there before."""
        self._is_over = True
        if threading.current_thread() is threading.main_thread():
            self.close()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # No lock and no log: the main thread may be anywhere.
        if self.got is None:
            self.got_at = time.monotonic()
            self.got = signal.Signals(number).name
        before = self._before.get(number)
        if self._is_over and before in (None, signal.SIG_DFL):
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        elif callable(before) and (self._is_over or before is not signal.default_int_handler):
            before(number, frame)


_living: weakref.WeakSet[Signals] = weakref.WeakSet()

# What the thread that forks lets through, as it was before.
_forking = threading.local()


def _block_signals() -> None:
    """Let none of the signals through: what came now to the child would only set our flag in it.

    So `terminate()` of a worker that was just started would be lost, and its `join()` hang.
    """
    numbers = {number for one in tuple(_living) for number in one._before}
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)


def _let_through() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _close_in_child() -> None:
    for one in tuple(_living):
        one.close()
    _let_through()


os.register_at_fork(
    before=_block_signals, after_in_parent=_let_through, after_in_child=_close_in_child
)


@dataclass
class RankRequests:
    """One rank's requests: signals on any rank; on rank 0 also what only that knows.

    That is its clock, saves that have failed, and what other processes ask for.
    Called in the thread of the rounds; waits for nothing.
    """

    rank: int
    save: SavePolicy
    signals: Signals
    keeper: MaintenanceThread | None = None
    outside: ExternalRequests | None = None
    saved_at: float = field(default_factory=time.monotonic)

    def __call__(self) -> BarrierProposal | None:
        """Return what is asked for now."""
        if self.signals.got is not None:
            why = f"{self.signals.got} on rank {self.rank}"
            waited_s = time.monotonic() - self.signals.got_at
            return BarrierProposal(self.rank, why, stops=True, waited_s=waited_s)
        if self.keeper is not None and (ask := self.keeper.wants()) is not None:
            return ask
        if self.outside is not None and (ask := self.outside.wants()) is not None:
            return ask
        is_time = self.save.is_time(time.monotonic() - self.saved_at)
        return (
            BarrierProposal(self.rank, "the time") if self.rank == COORDINATOR and is_time else None
        )

    def taken(self, step: int, *, is_last: bool) -> None:
        """Take it as said that this step is saved, or begun to be; `is_last`: the run ends then."""
        if self.outside is not None:
            self.outside.taken(step, is_last=is_last)

    def served(self, ask: BarrierProposal | None) -> None:
        """Take what was asked for as done, and count the time from now."""
        self.saved_at = time.monotonic()
        if ask is None:
            return
        if ask.stops:
            self.signals.forget()
        if self.keeper is not None:
            self.keeper.served(ask)


_log = logging.getLogger("dist_ckpt")

# How often the folder is looked at: a request is seen so much later. It costs one listing.
LOOK_S = 2.0

# How often a save that was asked for is looked at, which costs no call of the storage.
SETTLE_S = 0.1

# For so long answers stay, and what cannot be read, after this job has seen them first.
KEPT_S = 3600.0

# How much of who asked goes into a log.
MAX_BY = 200


@dataclass
class _SeenRequests:
    """What the threads share, under a lock.

    `open` wait for a boundary, `taken` for the save of a step. `last` is the run's last step, `end`
    what became of the run.
    """

    open: dict[str, RequestRecord] = field(default_factory=dict)
    taken: dict[str, int] = field(default_factory=dict)
    last: int | None = None
    end: str | None = None


class ExternalRequests:
    """Rank 0's thread for requests of other processes; it runs until `close`.

    All but `close` waits for nothing. Threads may share it.
    """

    def __init__(self, storage: Storage, run: Incarnation, keeper: MaintenanceThread) -> None:
        self._storage = storage
        self._run = run
        self._keeper = keeper
        self._changed = threading.Condition()
        self._asked = _SeenRequests()
        # Of the thread alone: what needs no second look, what cannot be read, and when files were
        # seen first.
        self._done: set[str] = set()
        self._damaged: set[str] = set()
        self._seen_at: dict[str, float] = {}
        self._has_warned = False
        self._thread = threading.Thread(target=self._work, name="dist_ckpt requests", daemon=True)
        self._thread.start()

    def wants(self) -> BarrierProposal | None:
        """Return what is to be asked of all ranks."""
        with self._changed:
            asked = [*self._asked.open.values()]
        if not asked:
            return None
        who = ", ".join(sorted({one.by[:MAX_BY] for one in asked}))
        return BarrierProposal(
            COORDINATOR, f"a request of {who}"[:MAX_BY], stops=any(r.stops for r in asked)
        )

    def taken(self, step: int, *, is_last: bool) -> None:
        """Say that all ranks have begun to save this step, or had saved it, at a boundary.

        That is what was asked for until now. `is_last`: the run ends there; else requests to stop
        are still open.
        """
        with self._changed:
            asked = self._asked
            if is_last:
                asked.last = step
            for one in [*asked.open.values()]:
                if is_last or not one.stops:
                    del asked.open[one.id]
                    asked.taken[one.id] = step
            self._changed.notify()

    def close(self, end: str, timeout_s: float) -> None:
        """Answer what is left, for so long at most, and end; `end` says what became of the run.

        The saves are settled by now, or will not be in time. May be called again.
        """
        with self._changed:
            self._asked.end = self._asked.end or end
            self._changed.notify()
        self._thread.join(timeout_s)

    # --- the thread ------------------------------------------------------------------------------

    def _work(self) -> None:
        next_look, next_renewal = 0.0, 0.0
        liveness = LivenessFile(self._storage, self._run.root, self._run.number)
        while self._asked.end is None:
            is_fine = True
            if time.monotonic() >= next_renewal:
                self._tried(liveness.renew)
                next_renewal = time.monotonic() + LIVENESS_INTERVAL_S
            if time.monotonic() >= next_look:
                is_fine = self._tried(self._look)
                next_look = time.monotonic() + LOOK_S
            is_fine = self._tried(self._answer_taken) and is_fine
            with self._changed:
                if self._asked.end is None:
                    self._changed.wait(SETTLE_S if self._asked.taken and is_fine else LOOK_S)
        for act in (self._look, self._answer_taken, self._answer_open, liveness.end):
            self._tried(act)

    def _tried(self, act: Callable[[], None]) -> bool:
        """Do something, and say whether it was done: what was not is tried again later."""
        try:
            act()
        except (CheckpointError, OSError) as error:
            level = logging.DEBUG if self._has_warned else logging.WARNING
            _log.log(level, "requests to save are not seen or not answered for now: %s", error)
            self._has_warned = True
        except Exception:  # noqa: BLE001 - a thread's outer edge
            _log.exception("requests to save are not seen or not answered for now")
        else:
            return True
        return False

    def _look(self) -> None:
        """See what is asked for, and what was taken back; prune what was answered long ago."""
        names = list_requests(self._storage, self._run.root)
        there = set(names.requests) - set(names.answers)
        with self._changed:
            asked = self._asked
            asked.open = {own_id: one for own_id, one in asked.open.items() if own_id in there}
            new = there - self._done - set(asked.open) - set(asked.taken)
        for own_id in sorted(new):
            if (one := self._read(own_id)) is not None:
                self._begin(one)
        self._prune(names)
        self._has_warned = False

    def _read(self, own_id: str) -> RequestRecord | None:
        try:
            return read_request(self._storage, self._run.root, own_id)
        except (CorruptError, IncompatibleError) as error:
            _log.warning("a request to save cannot be read, and is not obeyed: %s", error)
            self._done.add(own_id)
            self._damaged.add(own_id)
            return None

    def _begin(self, one: RequestRecord) -> None:
        own = self._run.number
        if one.incarnation == own:
            _log.info("%s asks for a save%s", one.by[:MAX_BY], " and the end" * one.stops)
            with self._changed:
                if self._asked.last is None:
                    self._asked.open[one.id] = one
                else:
                    self._asked.taken[one.id] = self._asked.last
        elif one.incarnation < own:
            why = f"incarnation {own} of the run has begun since: to ask that one, ask again"
            self._answer(one.id, "ended", why)
        else:  # the job that has taken over will see it
            self._done.add(one.id)

    def _prune(self, names: RequestNames) -> None:
        """Remove what was answered long ago, or cannot be read; a request before its answer."""
        over = self._damaged.union(names.answers)
        files = [request_file(one) for one in names.requests if one in over]
        files += [*map(answer_file, names.answers), *names.temporary]
        now = time.monotonic()
        self._seen_at = {name: self._seen_at.get(name, now) for name in files}
        for name in files:
            if now - self._seen_at[name] > KEPT_S:
                remove_file(self._storage, self._run.root, name)

    # --- answers ---------------------------------------------------------------------------------

    def _answer_taken(self) -> None:
        """Answer those whose save is durable, or has failed."""
        with self._changed:
            taken = dict(self._asked.taken)
        for own_id, step in taken.items():
            if (came := self._keeper.became_of(step)) is None:
                continue
            if isinstance(came, str):
                self._answer(own_id, "failed", came)
            else:
                self._answer(own_id, "saved", f"step {came[0]} is durable", came)

    def _answer_open(self) -> None:
        """Answer all others: the run has come to its end."""
        with self._changed:
            left, end = [*self._asked.taken, *self._asked.open], self._asked.end
        for own_id in left:
            self._answer(own_id, "ended", f"{end}. Safe is: {self._keeper.counts.durable}")

    def _answer(self, own_id: str, outcome: Outcome, why: str, saved: Where | None = None) -> None:
        put_answer(self._storage, self._run.root, own_id, outcome, why, saved)
        self._done.add(own_id)  # a listing may not have the answer yet
        with self._changed:
            self._asked.open.pop(own_id, None)
            self._asked.taken.pop(own_id, None)
