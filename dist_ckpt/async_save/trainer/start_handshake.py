"""The first exchange of a background save.

It raises earlier failures on all ranks, decides for busy ranks, and selects the writers' store.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence, Set
from contextlib import ExitStack
from typing import Literal

from dist_ckpt.async_save.snapshots.job_folder import NUM_ARENAS
from dist_ckpt.async_save.trainer.writer_handle import WriterHandle, first_error
from dist_ckpt.async_save.writer.writer_messages import StoreAddress
from dist_ckpt.core.comm.exchange.channel import COORDINATOR, check_equal_on_all_ranks
from dist_ckpt.core.comm.key_value.client_thread import JOB_STORE_TEXTS
from dist_ckpt.core.comm.key_value.key_client import TOKEN_NBYTES
from dist_ckpt.core.comm.rank_messages import Failure, build_error, describe_error
from dist_ckpt.core.comm.session import Session
from dist_ckpt.core.runtime.processes import find_process
from dist_ckpt.core.runtime.typed_msgpack import Message
from dist_ckpt.errors import RankError

_log = logging.getLogger("dist_ckpt")

WhenBusy = Literal["wait", "skip", "supersede"]

# A group of one rank needs no store.
_NO_STORE: StoreAddress = ("", 0, b"")

# The longest DNS name.
MAX_HOST_CHARS = 255

# The least time between the starts of two saves: a clock may be set back.
_LATER_S = 0.001


class SaverInfo(Message, frozen=True):
    """The options of a saver that are equal on all ranks. They identify the saver."""

    job: str | None
    root: str | None
    when_busy: WhenBusy


class _WriterState(Message, frozen=True):
    """The state of one rank's writer.

    `failed` has the saves whose failure was not reported yet, and their errors. `paused` is a save
    that can be superseded, or "". `joined` is the store of its last meeting with other writers.
    `machine` is that of the rank, as hosts may have the same name.
    """

    saver: SaverInfo
    failed: dict[str, Failure]
    committed: tuple[str, ...]
    is_busy: bool
    paused: str
    joined: StoreAddress | None
    host: str
    machine: str
    newest_at: float


class StartDecision(Message, frozen=True):
    """How a save begins on all ranks. It begins if no save has `failed` and it is not skipped.

    `committed` has the saves that a rank reports as committed. `queued` is a paused save, or "":
    this save supersedes it once all ranks agree on this save. The writers meet in `store`.
    `began_at` is the coordinator's clock, but later than the newest save of any rank.
    """

    failed: dict[str, Failure]
    committed: tuple[str, ...]
    is_skipped: bool
    queued: str
    store: StoreAddress
    began_at: float


def agree_on_start(
    session: Session,
    begin: Callable[[], WriterHandle],
    saver: SaverInfo,
    is_urgent: Callable[[], bool],
) -> StartDecision | None:
    """Return how a save begins, or None if it is skipped. Collective: every rank calls this.

    `begin` returns this rank's writer, which may be dead. If `is_urgent` becomes true, even during
    the wait, this save supersedes another one instead of waiting. The error of an earlier save on
    any rank is raised on all ranks, once.
    """
    channel = session.channel
    paused = ""
    with ExitStack() as stack:
        with channel.exchange("ready") as readying:
            writer = begin()
            _wait_until_ready(writer, session, saver, is_urgent)
            failed = {
                save.snapshot: describe_error(error, "write", channel.rank, channel.host)
                for save in writer.failed
                if (error := save.failure) is not None
            }
            if not failed:
                writer.ensure_running()
                supersedes = saver.when_busy == "supersede" or (_is_busy(writer) and is_urgent())
                unsettled = writer.unsettled
                if supersedes and unsettled and writer.pause(unsettled[-1].snapshot):
                    paused = unsettled[-1].snapshot
                    stack.callback(writer.end_pause, paused, drop=False)
            writer_state = _WriterState(
                saver=saver,
                failed=failed,
                committed=tuple(save.snapshot for save in writer.saves if save.is_committed),
                is_busy=_is_busy(writer),
                paused=paused,
                joined=writer.joined,
                host=channel.host,
                machine=_own_machine(),
                newest_at=writer.newest_at,
            )
            gathered = readying.gather(writer_state)
            if gathered is not None:
                readying.decide(_decide_start(gathered, writer))
        start = _apply_decision(readying.result(StartDecision), writer)
        if start is not None and start.queued:
            stack.pop_all()  # it stays paused until all ranks have agreed on this save
        return start


def _wait_until_ready(
    writer: WriterHandle, session: Session, saver: SaverInfo, is_urgent: Callable[[], bool]
) -> None:
    # A save that failed on another rank fails on this rank too: wait until it does.
    reported = [save for save in writer.unsettled if save.is_reported]
    settled_s = 2 * session.settings.heartbeat_timeout_s + session.settings.late_timeout_s
    writer.wait_for(lambda: all(save.is_settled for save in reported), settled_s)
    writer.receive_messages()
    if saver.when_busy == "wait":
        writer.wait_for(lambda: not _is_busy(writer) or bool(writer.failed) or is_urgent(), None)


def _is_busy(writer: WriterHandle) -> bool:
    return len(writer.unsettled) >= NUM_ARENAS


def _decide_start(states: Sequence[_WriterState], writer: WriterHandle) -> StartDecision:
    """Decide how the save begins. `writer` is the coordinator's: it may start a store."""
    check_equal_on_all_ranks("AsyncSaver.save", [state.saver for state in states])
    committed = {snapshot for state in states for snapshot in state.committed}
    failed = _merge_failures(states, committed)
    is_busy = any(state.is_busy for state in states)
    paused = {state.paused for state in states}
    begins = not failed and not (is_busy and states[0].saver.when_busy == "skip")
    return StartDecision(
        failed=failed,
        committed=tuple(sorted(committed)),
        is_skipped=not begins,
        # All ranks or none: otherwise some writers would wait for the others.
        queued=paused.pop() if is_busy and len(paused) == 1 else "",
        store=_choose_store(states, writer) if begins else _NO_STORE,
        began_at=max(time.time(), max(state.newest_at for state in states) + _LATER_S),
    )


def _choose_store(states: Sequence[_WriterState], writer: WriterHandle) -> StoreAddress:
    """Return the store that all writers have joined, or a new one."""
    if len(states) == 1:
        return _NO_STORE
    joined = states[0].joined
    if joined is not None and all(state.joined == joined for state in states):
        return joined
    own = states[0]
    others = [state.host for state in states if state.host != own.host]
    if not others and any(state.machine != own.machine for state in states):
        # By their name a host would reach itself.
        others = [os.environ.get("MASTER_ADDR", own.host)]
    return writer.serve_store(others[0] if others else "")


def _own_machine() -> str:
    process = find_process(os.getpid())
    return process.machine if process else ""


def _apply_decision(start: StartDecision, writer: WriterHandle) -> StartDecision | None:
    """Apply the decision to this rank's writer. Return None if the save is skipped."""
    # These saves are committed, but the writer of this rank died before it reported them.
    unreported = [save for save in writer.failed if save.snapshot in start.committed]
    for save in unreported:
        save.is_reported = True
        _log.warning("other ranks report that this save is committed: %s", save.failure)
    if start.failed:
        for save in writer.saves:
            if save.snapshot in start.failed:  # this rank may not have seen its failure
                save.is_reported = True
        writer.forget_reported()
        error = first_error([build_error(failure) for failure in start.failed.values()])
        error.add_note("The failure is of an earlier save. This save was not begun: save again.")
        raise error
    if unreported:
        writer.ensure_running()
    if start.is_skipped:
        return None
    _check_store(start.store)
    writer.newest_at = start.began_at
    return start


def _check_store(store: StoreAddress) -> None:
    """Raise RankError if the store has an invalid address or token."""
    host, port, token = store
    is_address = 0 < len(host) <= MAX_HOST_CHARS and 0 < port < 1 << 16
    if (is_address and len(token) == TOKEN_NBYTES) or store == _NO_STORE:
        return
    raise RankError(
        f"rank 0 sent an invalid address for the store of the background writers. "
        f"{JOB_STORE_TEXTS.strange}",
        rank=COORDINATOR,
    )


def _merge_failures(states: Sequence[_WriterState], committed: Set[str]) -> dict[str, Failure]:
    """Return the failure of each save that is not committed, by its snapshot; the oldest first.

    The report of the rank that failed is preferred: other ranks may only have seen its end.
    """
    reports: dict[str, list[tuple[bool, int, Failure]]] = {}
    for rank, state in enumerate(states):
        for snapshot, failure in state.failed.items():
            is_indirect = failure.rank != rank
            reports.setdefault(snapshot, []).append((is_indirect, rank, failure))
    return {
        snapshot: min(rank_reports, key=lambda report: report[:2])[2]
        for snapshot, rank_reports in reports.items()
        if snapshot not in committed
    }
