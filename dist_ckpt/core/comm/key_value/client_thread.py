"""The one thread through which a rank uses a key-value store that all ranks reach.

It serves the channel's calls in order, and sends heartbeats meanwhile. Calls have a deadline that
the store itself does not keep: a TCPStore whose host is frozen blocks for ever.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Concatenate, ParamSpec, TypeVar

from dist_ckpt.core.comm.key_value import store_values
from dist_ckpt.core.comm.key_value.store_values import Store
from dist_ckpt.core.comm.messages import HeartbeatSender, NoAnswerError
from dist_ckpt.core.runtime.threads import run_into

MAX_IDLE_S = 3600.0

T = TypeVar("T")
P = ParamSpec("P")


@dataclass(frozen=True, slots=True)
class StoreErrorTexts:
    """Parts of error messages about a store and its ranks.

    `gone`: the store does not answer, with {} for the fact. The others are remedies: `lost` for a
    lost rank, `absent` for one that never came, `mixed` for ranks in different calls, `strange` for
    data that is not from dist_ckpt.
    """

    gone: str
    lost: str
    absent: str
    mixed: str
    strange: str


JOB_STORE_TEXTS = StoreErrorTexts(
    gone="the job's key-value store is gone or cut off ({}). It lives in the process of the job's "
    "rank 0, or in the launcher: read its log, and restart the job",
    lost="Read that rank's log; if it is gone, restart the job from its last checkpoint.",
    absent="Every rank of the group must make the same call; look for a condition like "
    "`if rank == 0:` around it.",
    mixed="All ranks must make the same calls in the same order; look for a condition like "
    "`if rank == 0:` around one of these.",
    strange="Use the same version of dist_ckpt on all ranks. If they have it, another program "
    "writes to the job's key-value store: let only the job's hosts reach its port.",
)


class StoreClientThread:
    """A thread that owns a store's connection; it starts with the first call.

    It sends a heartbeat every `period_s`. A call that takes longer than `stall_timeout_s`, or that
    the store refuses, raises NoAnswerError.
    """

    def __init__(
        self,
        store: Store,
        heartbeat: HeartbeatSender,
        *,
        period_s: float,
        stall_timeout_s: float,
        texts: StoreErrorTexts = JOB_STORE_TEXTS,
    ) -> None:
        self._store = store
        self._gone = texts.gone
        self._heartbeat = heartbeat
        self._period_s = period_s
        self._stall_timeout_s = stall_timeout_s
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def call(
        self, function: Callable[Concatenate[Store, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Call `function` with the store and these arguments, and return its result."""
        future: Future[T] = Future()
        self._submit(future, partial(function, self._store, *args, **kwargs))
        try:
            return future.result(timeout=self._stall_timeout_s)
        except TimeoutError:
            future.cancel()
            raise NoAnswerError(
                self._gone.format(f"no answer for {self._stall_timeout_s:g} s")
            ) from None
        except (RuntimeError, OSError) as error:
            raise NoAnswerError(self._gone.format(summarize_error(error))) from error

    def post(
        self, function: Callable[Concatenate[Store, P], object], *args: P.args, **kwargs: P.kwargs
    ) -> None:
        """Call `function` soon, in the thread; its result and its errors are ignored."""
        self._submit(Future(), partial(function, self._store, *args, **kwargs))

    def send_heartbeat(self) -> None:
        """Send a heartbeat soon, since its content has changed."""
        self.post(_beat, self._heartbeat)

    @property
    def is_open(self) -> bool:
        """True while the thread runs: not before the first call, nor in a forked child."""
        return self._thread is not None and self._thread.is_alive()

    def close(self) -> None:
        """Send a last heartbeat, with `gone` set, and end the thread. May be called again."""
        if self._thread is None or not self.is_open:
            return
        self._heartbeat.gone = True
        self.send_heartbeat()
        self._calls.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=1.0)

    def _submit(self, future: Future[T], call: Callable[[], T]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(
                # Without `self`: the thread must not keep it, nor its channel, alive.
                target=_serve,
                args=(self._calls, self._store, self._heartbeat, self._period_s),
                name="dist_ckpt heartbeat",
                daemon=True,
            )
            try:
                self._thread.start()
            except BaseException:  # the system starts no more threads, or an interrupt
                self._calls.put(None)  # a thread that runs after all ends
                self._calls, self._thread = SimpleQueue(), None
                raise
        elif not self._thread.is_alive():
            raise NoAnswerError(
                "the channel is closed, or belongs to the process that this one was forked from: "
                "save and load in the process that created the group"
            )
        self._calls.put(partial(run_into, future, call))


def _beat(store: Store, heartbeat: HeartbeatSender) -> None:
    if heartbeat.key:
        store_values.put(store, heartbeat.key, heartbeat.encode_next())


def _serve(
    calls: SimpleQueue[Callable[[], None] | None],
    store: Store,
    heartbeat: HeartbeatSender,
    period_s: float,
) -> None:
    # A busy thread must also send heartbeats, so calls do not move the time of the next one.
    due = 0.0
    while True:
        now = time.monotonic()
        if now >= due:
            due = now + period_s
            try:
                _beat(store, heartbeat)
            except (RuntimeError, OSError):
                # A lost store stays lost, and torch prints a page about each attempt.
                due = float("inf")
        try:
            call = calls.get(timeout=min(max(0.0, due - now), MAX_IDLE_S))
        except Empty:
            continue
        if call is None:
            return
        call()


def summarize_error(error: BaseException) -> str:
    """Return the class of an error and its first line: torch adds pages."""
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
