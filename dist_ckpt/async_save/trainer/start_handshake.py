"""The first exchange of a background save: what has failed, who is busy, where the writers meet."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from dist_ckpt.async_save.snapshots.job_folder import NUM_ARENAS
from dist_ckpt.async_save.trainer.writer_handle import WriteJob, WriterHandle, first_error
from dist_ckpt.core.comm.exchange.channel import COORDINATOR, Channel, check_equal_on_all_ranks
from dist_ckpt.core.comm.key_value.client_thread import JOB_STORE_TEXTS
from dist_ckpt.core.comm.key_value.key_client import TOKEN_NBYTES
from dist_ckpt.core.comm.messages import Failure, error_of, failure_of
from dist_ckpt.core.comm.session import Session
from dist_ckpt.core.runtime.typed_msgpack import Message
from dist_ckpt.errors import RankError

_log = logging.getLogger("dist_ckpt")

WhenBusy = Literal["wait", "skip", "supersede"]

# Where writers meet: host, port, token.
MeetingPlace = tuple[str, int, bytes]

# The store of a group of one: nobody meets.
_NOWHERE: MeetingPlace = ("", 0, b"")

# A DNS name is no longer.
MAX_HOST_CHARS = 255

# How much later than the newest save one is said to begin at least: a clock may be set back.
_LATER_S = 0.001


class SaverInfo(Message, frozen=True):
    """The options of a saver that are the same on all ranks, and so tell savers apart."""

    job: str | None
    root: str | None
    when_busy: WhenBusy


def check_savers(call: str, savers: Sequence[SaverInfo]) -> None:
    """Raise ValueError if the ranks call a method of different savers."""
    check_equal_on_all_ranks(call, savers, SaverInfo.__struct_fields__)


class _WriterState(Message, frozen=True):
    """How one rank's writer is.

    `failed` are its saves of which nobody was told that they failed, and why; `committed` others.
    `paused` is a save that can be superseded, "" if there is none. `joined` is where it has met the
    other writers.
    """

    saver: SaverInfo
    failed: dict[str, Failure]
    committed: tuple[str, ...]
    is_busy: bool
    paused: str
    joined: MeetingPlace | None
    host: str
    newest_at: float


class Start(Message, frozen=True):
    """How a save begins on all ranks. It does not if one has `failed`, or if it `is_skipped`.

    `committed` are saves that some rank knows to be checkpoints. `queued` is a save that this one
    is to supersede on all ranks, once they agree on it: paused until then; "" if there is none.
    `store` is where the writers meet. `began_at` is the coordinator's clock, but later than the
    newest save that any rank knows.
    """

    failed: dict[str, Failure]
    committed: tuple[str, ...]
    is_skipped: bool
    queued: str
    store: MeetingPlace
    began_at: float


def agree_on_start(
    ranks: Session,
    begin: Callable[[], WriterHandle],
    saver: SaverInfo,
    is_urgent: Callable[[], bool] = bool,
) -> Start | None:
    """Return how a save begins, or None if it is skipped. Collective: every rank calls this.

    `begin` returns this rank's writer, which may be dead. `is_urgent` says, also while it waits,
    whether this save is to supersede another rather than to wait. Raises, on all ranks, what an
    earlier save has failed of on any of them, once.
    """
    channel = ranks.channel
    writer: WriterHandle | None = None
    paused = ""
    start: Start | None = None
    try:
        with channel.exchange("ready") as readying:
            writer = begin()
            _await_readiness(writer, ranks, saver, is_urgent)
            failed = {order.snapshot: _failure_of(order, channel) for order in writer.failed}
            if not failed:
                writer.ensure()
                supersedes = saver.when_busy == "supersede" or (_is_busy(writer) and is_urgent())
                paused = _paused(writer) if supersedes else ""
            own = _WriterState(
                saver=saver,
                failed=failed,
                committed=tuple(order.snapshot for order in writer.orders if order.is_committed),
                is_busy=_is_busy(writer),
                paused=paused,
                joined=writer.joined,
                host=channel.host,
                newest_at=writer.newest_at,
            )
            gathered = readying.gather(own)
            if gathered is not None:
                readying.decide(_judge(gathered, writer))
        start = _taken_note_of(readying.result(Start), writer)
    finally:
        if writer is not None and paused and (start is None or not start.queued):
            writer.go(paused, drop=False)
    return start


def _await_readiness(
    writer: WriterHandle, ranks: Session, saver: SaverInfo, is_urgent: Callable[[], bool]
) -> None:
    # What failed elsewhere is about to fail here: before it has, nobody can go on.
    told = [order for order in writer.unsettled if order.is_told]
    settled_s = 2 * ranks.config.heartbeat_timeout_s + ranks.config.join_timeout_s
    writer.wait_for(lambda: all(order.is_settled for order in told), settled_s)
    writer.look()
    if saver.when_busy == "wait":
        writer.wait_for(lambda: not _is_busy(writer) or bool(writer.failed) or is_urgent(), None)


def _is_busy(writer: WriterHandle) -> bool:
    return len(writer.unsettled) >= NUM_ARENAS


def _paused(writer: WriterHandle) -> str:
    """Pause the save that may be superseded; return its name, "" if there is none."""
    unsettled = [order.snapshot for order in writer.unsettled]
    if unsettled and writer.pause(unsettled[-1]):
        return unsettled[-1]
    return ""


def _failure_of(order: WriteJob, channel: Channel) -> Failure:
    assert order.failure is not None
    return failure_of(order.failure, "write", channel.rank, channel.host)


def _judge(told: Sequence[_WriterState], writer: WriterHandle) -> Start:
    """Decide how the save begins; `writer` is the coordinator's: it may have to serve a store."""
    check_savers("AsyncSaver.save", [one.saver for one in told])
    committed = {snapshot for one in told for snapshot in one.committed}
    failed = {
        snapshot: failure
        for snapshot, failure in _failed(told).items()
        if snapshot not in committed
    }
    is_busy = any(one.is_busy for one in told)
    paused = {one.paused for one in told}
    goes_on = not failed and not (is_busy and told[0].saver.when_busy == "skip")
    return Start(
        failed=failed,
        committed=tuple(sorted(committed)),
        is_skipped=not goes_on,
        # All ranks or none: else the writers of some would wait for those of others.
        queued=paused.pop() if is_busy and len(paused) == 1 else "",
        store=_store(told, writer) if goes_on else _NOWHERE,
        began_at=max(time.time(), max(one.newest_at for one in told) + _LATER_S),
    )


def _store(told: Sequence[_WriterState], writer: WriterHandle) -> MeetingPlace:
    """Return where all writers meet: where they have met before, or in a new store."""
    if len(told) == 1:
        return _NOWHERE
    joined = told[0].joined
    if joined is not None and all(one.joined == joined for one in told):
        return joined
    others = [one.host for one in told if one.host != told[0].host]
    return writer.serve(others[0] if others else "")


def _taken_note_of(start: Start, writer: WriterHandle) -> Start | None:
    """Return how the save begins, None if it is skipped: the writer here knows now what all do."""
    # What was committed though the writer here died before it could say so.
    mistaken = [order for order in writer.failed if order.snapshot in start.committed]
    for order in mistaken:
        order.is_told = True
        _log.warning("a background save is committed, as other ranks say: %s", order.failure)
    if start.failed:
        _raise(start.failed, writer)
    if mistaken:
        writer.ensure()
    if start.is_skipped:
        return None
    _check_store(start.store)
    writer.newest_at = start.began_at
    return start


def _raise(failed: Mapping[str, Failure], writer: WriterHandle) -> None:
    """Raise the failures; here too they count as told, if they are known yet or not."""
    for order in writer.orders:
        if order.snapshot in failed:
            order.is_told = True
    writer.forget_told()
    error = first_error([error_of(failure) for failure in failed.values()])
    error.add_note("That was an earlier save. This one was not begun: save again.")
    raise error


def _check_store(store: MeetingPlace) -> None:
    """Raise RankError if this is no address and no token."""
    host, port, token = store
    is_place = 0 < len(host) <= MAX_HOST_CHARS and 0 < port < 1 << 16
    if (is_place and len(token) == TOKEN_NBYTES) or store == _NOWHERE:
        return
    raise RankError(
        f"rank 0 sent no address at which the background writers can meet. "
        f"{JOB_STORE_TEXTS.strange}",
        rank=COORDINATOR,
    )


def _failed(told: Sequence[_WriterState]) -> dict[str, Failure]:
    """Return why each save has failed, by its snapshot; the oldest save first.

    The rank to which it happened knows best: the others may have seen no more than that it is gone.
    """
    reports: dict[str, list[tuple[bool, int, Failure]]] = {}
    for rank, one in enumerate(told):
        for snapshot, failure in one.failed.items():
            is_hearsay = failure.rank != rank
            reports.setdefault(snapshot, []).append((is_hearsay, rank, failure))
    return {snapshot: min(some, key=lambda one: one[:2])[2] for snapshot, some in reports.items()}
