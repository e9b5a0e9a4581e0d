"""The one thread through which a rank talks to a key-value store that all ranks reach.

It serves the channel's calls in order, with a deadline that the store itself does not keep (a
TCPStore whose host is frozen blocks for ever), and beats the heart meanwhile.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from dist_ckpt.core.comm.liveness.heartbeat import HeartbeatSender
from dist_ckpt.core.comm.messages import MAX_DOCUMENT_NBYTES, NoAnswerError
from dist_ckpt.core.runtime.threads import run_into

# A TCPStore takes values of 8 MiB at most; larger ones are stored in parts.
PART_NBYTES = 4 << 20

# A document is a little less than its message.
MAX_PARTS = MAX_DOCUMENT_NBYTES // PART_NBYTES + 1

# What is read where something stands that `put` did not store: no message of ours is empty.
NOTHING = b""

_COUNTER = re.compile(rb"[0-9]{1,18}")

MAX_IDLE_S = 3600.0

# A stored value begins with what it is: itself, or the number of its parts, which stand beside it.
# One that was withdrawn keeps that number, for the deletion to come.
_WHOLE = b"w"
_PARTS = b"p"
_WITHDRAWN = b"x"

T = TypeVar("T")
P = ParamSpec("P")


class Store(Protocol):
    """What is needed of a key-value store; every store of torch.distributed has it."""

    def set(self, key: str, value: bytes, /) -> None:
        """Store a value."""

    def get(self, key: str, /) -> bytes:
        """Return the value of a key that exists; if it is deleted just then, wait or KeyError."""

    def check(self, keys: list[str], /) -> bool:
        """Say whether all of these keys exist."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to a counter, which begins at 0, and return its new value."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Set a key that has the expected value, "" for none; return what it has now.

        Torch's return `expected` for a key that has no value, if that is not "".
        """

    def delete_key(self, key: str, /) -> bool:
        """Delete a key; False if there was none."""


def put(store: Store, key: str, data: bytes) -> None:
    """Store a value of any size; it is there as a whole or not at all."""
    if len(data) < PART_NBYTES:
        store.set(key, _WHOLE + data)
        return
    starts = range(0, len(data), PART_NBYTES)
    for number, start in enumerate(starts):
        store.set(f"{key}/{number}", data[start : start + PART_NBYTES])
    store.set(key, _PARTS + str(len(starts)).encode())


def put_once(store: Store, key: str, text: str) -> bytes:
    """Store a short text unless something is there; return what is there now, as `get_all` does.

    Of those who do so at once the store picks one, and all of them learn which.
    """
    there = store.compare_set(key, "", _WHOLE.decode() + text)
    return there[1:] if there[:1] == _WHOLE else NOTHING


def get_all(store: Store, keys: Sequence[str]) -> list[bytes] | None:
    """Return the values that `put` stored, or None if one is not there yet.

    What stands there and was not stored by `put` is returned as `NOTHING`.
    """
    if not store.check(list(keys)):
        return None
    try:
        values = _stored(store, keys)
        if any(data[:1] == _WITHDRAWN for data in values):
            return None
        found = [_whole(store, *stored) for stored in zip(keys, values, strict=True)]
    except KeyError:  # deleted since then
        return None
    return None if None in found else [data for data in found if data is not None]


def _stored(store: Store, keys: Sequence[str]) -> list[bytes]:
    # One round trip where the store can do it, instead of one a rank.
    if hasattr(store, "multi_get"):
        values: list[bytes] = store.multi_get(list(keys))
        return values
    return [store.get(key) for key in keys]


def _whole(store: Store, key: str, data: bytes) -> bytes | None:
    """Return the value that begins with these bytes; None if it is deleted just now."""
    if data[:1] == _WHOLE:
        return data[1 : PART_NBYTES + 1]
    parts = _parts(key, data)
    if data[:1] != _PARTS or not parts:
        return NOTHING
    # To get one that is not there would wait for it, for as long as the store likes. They are put
    # before the value, and deleted after it.
    if not store.check(parts):
        return NOTHING if store.check([key]) else None
    return b"".join(part[:PART_NBYTES] for part in _stored(store, parts))


def get_each(store: Store, keys: Sequence[str]) -> list[bytes | None]:
    """Return the values that `put` stored, None where there is none yet."""
    if (found := get_all(store, keys)) is not None:
        return [*found]
    if len(keys) == 1:
        return [None]
    return [value for key in keys for value in get_each(store, [key])]


def increment(store: Store, key: str) -> int:
    """Add 1 to a counter, and return it. ValueError if what stands there is none."""
    # Of torch's stores one kind raises, and another cuts the connection off, if they are to add to
    # what is no number; beyond 64 bits they go on with a negative one.
    value = counted(store, key)
    if value and not _COUNTER.fullmatch(value):
        raise ValueError(f"{len(value)} bytes that are no counter")
    return store.add(key, 1)


def counted(store: Store, key: str) -> bytes:
    """Return what stands where a counter is, b"" if nothing does."""
    return store.get(key) if store.check([key]) else b""


def withdraw(store: Store, keys: Sequence[str]) -> None:
    """Have readers see nothing under these keys, though one may be about to read them.

    To `delete` them would stop it: a read of what was there a moment ago waits in the store.
    """
    for key in keys:
        if store.check([key]):
            num_parts = len(_parts(key, store.get(key)))
            store.set(key, _WITHDRAWN + str(num_parts).encode())


def delete(store: Store, keys: Sequence[str]) -> None:
    """Delete what `put` stored under these keys, where there is anything."""
    for key in keys:
        if not store.check([key]):
            continue
        parts = _parts(key, store.get(key))
        store.delete_key(key)
        for part in parts:
            store.delete_key(part)


def _parts(key: str, data: bytes) -> list[str]:
    """Return the keys of the parts of a value that begins with these bytes."""
    digits = data[1:]
    if data[:1] not in (_PARTS, _WITHDRAWN) or len(digits) > 4 or not digits.isdigit():
        return []
    num_parts = int(digits)
    return [f"{key}/{number}" for number in range(num_parts if num_parts <= MAX_PARTS else 0)]


@dataclass(frozen=True, slots=True)
class StoreErrorTexts:
    """What errors say of a store and its ranks.

    `gone`: the store does not answer, with {} for the fact; `lost`, `absent`: what to do about a
    rank of which nothing more will come, and one that never came; `mixed`: about ranks that make
    different calls; `strange`: about what no rank of ours has stored.
    """

    gone: str
    lost: str
    absent: str
    mixed: str
    strange: str


JOB_STORE_TEXTS = StoreErrorTexts(
    gone="the job's key-value store is gone or cut off ({}). It lives in the process of the job's "
    "rank 0, or in the launcher; look there, and restart the job",
    lost="Look into that rank's log; if it is gone, restart the job from its last checkpoint.",
    absent="Every rank of the group must make the same call; look for a condition like "
    "`if rank == 0:` around it.",
    mixed="All of them must make the same calls in the same order; look for a condition like "
    "`if rank == 0:` around one of these.",
    strange="Let all ranks have the same version of dist_ckpt; if they have, another program "
    "writes to the job's key-value store: let only the job's hosts reach its port.",
)


class StoreClientThread:
    """A thread that owns a store's connection; it starts with the first call.

    It beats every `period_s`; a call that takes longer than `stall_timeout_s` raises NoAnswerError,
    as does one that the store refuses.
    """

    def __init__(
        self,
        store: Store,
        heart: HeartbeatSender,
        *,
        period_s: float,
        stall_timeout_s: float,
        wording: StoreErrorTexts = JOB_STORE_TEXTS,
    ) -> None:
        self._store = store
        self._gone = wording.gone
        self._heart = heart
        self._period_s = period_s
        self._patience_s = stall_timeout_s
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def call(
        self, function: Callable[Concatenate[Store, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Return what `function` returns for the store and what else is given to it."""
        future: Future[T] = Future()
        self._submit(future, partial(function, self._store, *args, **kwargs))
        try:
            return future.result(timeout=self._patience_s)
        except TimeoutError:
            future.cancel()
            raise NoAnswerError(
                self._gone.format(f"no answer for {self._patience_s:g} s")
            ) from None
        except (RuntimeError, OSError) as error:
            raise NoAnswerError(self._gone.format(first_reached(error))) from error

    def post(
        self, function: Callable[Concatenate[Store, P], object], *args: P.args, **kwargs: P.kwargs
    ) -> None:
        """Have `function` called soon; what becomes of it does not matter."""
        self._submit(Future(), partial(function, self._store, *args, **kwargs))

    def beat(self) -> None:
        """Send a heartbeat soon: what it says has changed."""
        self.post(_beat, self._heart)

    @property
    def is_open(self) -> bool:
        """Whether the thread runs: not before the first call, nor in a forked child."""
        return self._thread is not None and self._thread.is_alive()

    def close(self) -> None:
        """Send a last heartbeat, which says so, and end the thread. May be called again."""
        if self._thread is None or not self.is_open:
            return
        self._heart.gone = True
        self.beat()
        self._calls.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=1.0)

    def _submit(self, future: Future[T], call: Callable[[], T]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(
                # Without `self`: the thread must not keep the line, nor its channel, alive.
                target=_serve,
                args=(self._calls, self._store, self._heart, self._period_s),
                name="dist_ckpt heartbeat",
                daemon=True,
            )
            try:
                self._thread.start()
            except BaseException:  # the system starts no more threads, or an interrupt
                self._calls.put(None)  # if it runs after all, it ends
                self._calls, self._thread = SimpleQueue(), None
                raise
        elif not self._thread.is_alive():
            raise NoAnswerError(
                "the channel is closed, or belongs to the process that this one was forked from: "
                "save and load in the process that made the group"
            )
        self._calls.put(partial(run_into, future, call))


def _beat(store: Store, heart: HeartbeatSender) -> None:
    if heart.key:
        put(store, heart.key, heart.beat())


def _serve(
    calls: SimpleQueue[Callable[[], None] | None],
    store: Store,
    heart: HeartbeatSender,
    period_s: float,
) -> None:
    # A busy line must beat as well, so the deadline of the next beat does not move with the calls.
    due = 0.0
    while True:
        now = time.monotonic()
        if now >= due:
            due = now + period_s
            try:
                _beat(store, heart)
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


def first_reached(error: BaseException) -> str:
    """Return the class of an error and the first line of it: torch adds pages."""
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
