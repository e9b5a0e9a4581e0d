"""The one thread through which a rank uses a key-value store that all ranks reach.

It serves the channel's calls in order, and heartbeats between them. Calls have a deadline that
the store itself does not keep: a TCPStore whose host is frozen blocks for ever. A second thread
orders the heartbeats, and shows other processes when the store does not answer.

Values in the store may have any size. Values that are not from dist_ckpt do no harm.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from dist_ckpt.core.comm.rank_messages import MAX_DOCUMENT_NBYTES, HeartbeatSender, NoAnswerError
from dist_ckpt.core.runtime.network import LivenessPort
from dist_ckpt.core.runtime.processes import show_cut_off
from dist_ckpt.core.runtime.threads import has_outcome, run_into
from dist_ckpt.settings import launched_on_one_host

# A rank shows that it is cut off if a heartbeat takes this share of the stall timeout. With the
# period of the heartbeats before it, that is a little less than the silence the others wait for.
CUT_OFF_SHARE = 0.75

# How long the first heartbeat waits for the address of this host.
ADDRESS_S = 1.0

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

    It sends a heartbeat about every `period_s`, and then calls `after_beat`. A call that takes
    longer than `stall_timeout_s`, or that the store refuses, raises NoAnswerError.
    """

    def __init__(
        self,
        store: Store,
        heartbeat: HeartbeatSender,
        *,
        period_s: float,
        stall_timeout_s: float,
        texts: StoreErrorTexts = JOB_STORE_TEXTS,
        after_beat: Callable[[Store], None] = lambda _: None,
    ) -> None:
        self._store = store
        self._after_beat = after_beat
        self._gone = texts.gone
        self._heartbeat = heartbeat
        self._period_s = period_s
        self._stall_timeout_s = stall_timeout_s
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def call(
        self, function: Callable[Concatenate[Store, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Call `function` with the store and these arguments, and return its result."""
        future: Future[T] = Future()
        self._submit(future, partial(function, self._store, *args, **kwargs))
        try:
            if not has_outcome(future, self._stall_timeout_s):
                raise TimeoutError
            return future.result(timeout=0)
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
        """Send a last heartbeat, with `gone` set, and end the threads. May be called again."""
        if self._thread is None or not self.is_open:
            return
        self._ended.set()
        self._heartbeat.gone = True
        self.send_heartbeat()
        self._calls.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=1.0)

    def _submit(self, future: Future[T], call: Callable[[], T]) -> None:
        if self._thread is None:
            self._start()
        elif not self._thread.is_alive():
            raise NoAnswerError(
                "the channel is closed, or belongs to the process that this one was forked from: "
                "save and load in the process that created the group"
            )
        self._calls.put(partial(run_into, future, call))

    def _start(self) -> None:
        # Without `self`: the threads must not keep it, nor its channel, alive.
        keep_beating = partial(
            _keep_beating,
            self._calls,
            self._ended,
            partial(_beat_and_look, self._store, self._heartbeat, self._after_beat),
            self._heartbeat,
            period_s=self._period_s,
            patience_s=CUT_OFF_SHARE * self._stall_timeout_s,
        )
        beating = threading.Thread(target=keep_beating, name="dist_ckpt heartbeat", daemon=True)
        self._thread = threading.Thread(
            target=_serve, args=(self._calls,), name="dist_ckpt store", daemon=True
        )
        try:
            self._thread.start()
            beating.start()
        except BaseException:  # the system starts no more threads, or an interrupt
            self._ended.set()
            self._calls.put(None)  # a thread that runs after all ends
            self._calls, self._ended, self._thread = SimpleQueue(), threading.Event(), None
            raise


def _serve(calls: SimpleQueue[Callable[[], None] | None]) -> None:
    while (call := calls.get()) is not None:
        call()


def _beat(store: Store, heartbeat: HeartbeatSender) -> None:
    if heartbeat.key:
        put(store, heartbeat.key, heartbeat.encode_next())


def _beat_and_look(
    store: Store, heartbeat: HeartbeatSender, after_beat: Callable[[Store], None]
) -> None:
    _beat(store, heartbeat)
    after_beat(store)


def _keep_beating(
    calls: SimpleQueue[Callable[[], None] | None],
    ended: threading.Event,
    beat: Callable[[], None],
    heartbeat: HeartbeatSender,
    *,
    period_s: float,
    patience_s: float,
) -> None:
    """Request heartbeats until `ended`. Show when the store does not answer for `patience_s`.

    This thread shows nothing while other code has the interpreter's lock, or the process is
    stopped.
    """
    heartbeat.thread = threading.get_native_id()
    with closing(LivenessPort(_other_hosts())) as port:
        heartbeat.address = port.renew(ADDRESS_S)
        while True:
            sent: Future[None] = Future()
            calls.put(partial(run_into, sent, beat))
            while not has_outcome(sent, patience_s):
                show_cut_off(is_cut_off=True)
                port.close()
                if ended.is_set():
                    return
            if sent.exception(timeout=0) is not None:
                # A lost store stays lost, and torch prints a page about each attempt. The end of
                # this thread shows that this rank is cut off.
                return
            show_cut_off(is_cut_off=False)
            heartbeat.address = port.renew()
            if ended.wait(period_s):
                return


def _other_hosts() -> str | None:
    return None if launched_on_one_host() else os.environ.get("MASTER_ADDR", "")


def summarize_error(error: BaseException) -> str:
    """Return the class of an error and its first line: torch adds pages."""
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


# A TCPStore takes values of 8 MiB at most; larger ones are stored in parts.
PART_NBYTES = 4 << 20

# A document is a little less than its message.
MAX_PARTS = MAX_DOCUMENT_NBYTES // PART_NBYTES + 1

# The result for a value that `put` did not store: no valid message is empty.
NO_VALUE = b""

_COUNTER = re.compile(rb"[0-9]{1,18}")

# The first byte of a value. The whole value follows it, or the number of parts, each of which has a
# key. A withdrawn value keeps that number, for `delete`.
_WHOLE = b"w"
_PARTS = b"p"
_WITHDRAWN = b"x"


class Store(Protocol):
    """The methods of a key-value store used here; every store of torch.distributed has them."""

    def set(self, key: str, value: bytes, /) -> None:
        """Store a value."""

    def get(self, key: str, /) -> bytes:
        """Return the value of an existing key; wait or raise KeyError if it is just deleted."""

    def check(self, keys: list[str], /) -> bool:
        """Return True if all of these keys exist."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to a counter, which begins at 0, and return its new value."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Set a key if it has the expected value, "" for none; return its value now.

        Without a value torch's stores return `expected`, if that is not "".
        """

    def delete_key(self, key: str, /) -> bool:
        """Delete a key; return False if it did not exist."""


def put(store: Store, key: str, data: bytes) -> None:
    """Store a value of any size; readers see all of it or nothing."""
    if len(data) < PART_NBYTES:
        store.set(key, _WHOLE + data)
        return
    starts = range(0, len(data), PART_NBYTES)
    for number, start in enumerate(starts):
        store.set(f"{key}/{number}", data[start : start + PART_NBYTES])
    store.set(key, _PARTS + str(len(starts)).encode())


def put_once(store: Store, key: str, text: str) -> bytes:
    """Store a short text unless the key has one; return the value now, as `get_all` does.

    If several ranks call it together, all return the text of the same one.
    """
    value = store.compare_set(key, "", _WHOLE.decode() + text)
    return value[1:] if value[:1] == _WHOLE else NO_VALUE


def get_all(store: Store, keys: Sequence[str]) -> list[bytes] | None:
    """Return the values that `put` stored, `NO_VALUE` for other data; None if one is missing."""
    if not store.check(list(keys)):
        return None
    try:
        values = _read_values(store, keys)
        if any(data[:1] == _WITHDRAWN for data in values):
            return None
        wholes = [_join_parts(store, *stored) for stored in zip(keys, values, strict=True)]
    except KeyError:  # deleted since then
        return None
    return None if None in wholes else [data for data in wholes if data is not None]


def _read_values(store: Store, keys: Sequence[str]) -> list[bytes]:
    # One round trip if the store can do it, instead of one for each rank.
    if hasattr(store, "multi_get"):
        values: list[bytes] = store.multi_get(list(keys))
        return values
    return [store.get(key) for key in keys]


def _join_parts(store: Store, key: str, data: bytes) -> bytes | None:
    """Return the value that begins with these bytes; None if it is just being deleted."""
    if data[:1] == _WHOLE:
        return data[1 : PART_NBYTES + 1]
    parts = _part_keys(key, data)
    if data[:1] != _PARTS or not parts:
        return NO_VALUE
    # `get` of a missing key would wait, with the store's deadline. Parts are stored before the
    # value, and deleted after it.
    if not store.check(parts):
        return NO_VALUE if store.check([key]) else None
    return b"".join(part[:PART_NBYTES] for part in _read_values(store, parts))


def get_each(store: Store, keys: Sequence[str]) -> list[bytes | None]:
    """Return the values that `put` stored, None for each missing one."""
    if (values := get_all(store, keys)) is not None:
        return [*values]
    if len(keys) == 1:
        return [None]
    return [value for key in keys for value in get_each(store, [key])]


def increment(store: Store, key: str) -> int:
    """Add 1 to a counter, and return it. ValueError if its value is not a counter."""
    # If the value is not a number, some of torch's stores raise, and others cut the connection.
    # Beyond 64 bits they continue with a negative number.
    value = read_counter(store, key)
    if value and not _COUNTER.fullmatch(value):
        raise ValueError(f"{len(value)} bytes that are not a counter")
    return store.add(key, 1)


def read_counter(store: Store, key: str) -> bytes:
    """Return the value of a counter, b"" if it does not exist."""
    return store.get(key) if store.check([key]) else b""


def withdraw(store: Store, keys: Sequence[str]) -> None:
    """Hide values from readers. With `delete` a read that has begun would wait in the store."""
    for key in keys:
        if store.check([key]):
            num_parts = len(_part_keys(key, store.get(key)))
            store.set(key, _WITHDRAWN + str(num_parts).encode())


def delete(store: Store, keys: Sequence[str]) -> None:
    """Delete the values that `put` stored under these keys, if any."""
    for key in keys:
        if not store.check([key]):
            continue
        parts = _part_keys(key, store.get(key))
        store.delete_key(key)
        for part in parts:
            store.delete_key(part)


def _part_keys(key: str, data: bytes) -> list[str]:
    digits = data[1:]
    if data[:1] not in (_PARTS, _WITHDRAWN) or len(digits) > 4 or not digits.isdigit():
        return []
    num_parts = int(digits)
    return [f"{key}/{number}" for number in range(num_parts if num_parts <= MAX_PARTS else 0)]
