"""The first exchange of a background save: what has failed, who is busy, where the writers meet."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from dist_ckpt.background.writer_client import Order, OwnWriter, error_in, first_error
from dist_ckpt.comm.exchange import COORDINATOR, Doc, check_alike, failure_of
from dist_ckpt.comm.key_client import TOKEN_NBYTES
from dist_ckpt.comm.session import Session
from dist_ckpt.comm.store_thread import OF_THE_JOB
from dist_ckpt.errors import RankError
from dist_ckpt.snapshots.job_folder import NUM_ARENAS

_log = logging.getLogger("dist_ckpt")

WhenBusy = Literal["wait", "skip", "supersede"]

# The store of a group of one: nobody meets.
_NOWHERE = ("", 0, b"")

# The options of a saver that are the same on all ranks, and so tell savers apart.
ALIKE = ("job", "root", "when_busy")

# A DNS name is no longer.
MAX_HOST_CHARS = 255

# How much later than the newest save one is said to begin at least: a clock may be set back.
_LATER_S = 0.001


@dataclass(frozen=True, slots=True)
class Start:
    """How a background save begins: where the writers meet, and when it begins.

    That is the coordinator's clock, but later than the newest save that any rank knows. `queued` is
    a save that this one is to supersede on all ranks, once they agree on it: paused until then.
    """

    store: tuple[str, int, bytes]
    began_at: float
    queued: Order | None = None


class Readiness:
    """One rank's side of that exchange.

    `begin` returns this rank's writer, which may be dead; `saver` has the saver's options `ALIKE`.
    """

    def __init__(
        self, ranks: Session, begin: Callable[[], OwnWriter], when_busy: WhenBusy, saver: Doc
    ) -> None:
        self._ranks = ranks
        self._begin = begin
        self._writer: OwnWriter
        self._when_busy = when_busy
        self._saver = saver
        self._paused: Order | None = None

    def agree(self) -> Start | None:
        """Return how the save begins, or None if it is skipped. Collective: every rank calls this.

        Raises, on all ranks, what an earlier save has failed of on any of them, once.
        """
        start: Start | None = None
        try:
            start = self._agreed()
        finally:
            if self._paused is not None and (start is None or start.queued is None):
                self._writer.go(self._paused, drop=False)
        return start

    def _agreed(self) -> Start | None:
        answer = self._ranks.channel.exchange("ready", self._report, self._decide)
        is_mistaken = self._learn(answer["committed"])
        if answer["failed"]:
            self._raise(answer["failed"])
        if is_mistaken:
            self._writer.ensure()
        if answer["skipped"]:
            return None
        store = _checked_store(answer["store"])
        self._writer.newest_at = answer["began_at"]
        is_superseded = self._paused is not None and self._paused.snapshot == answer["queued"]
        queued = self._paused if is_superseded else None
        return Start(store, answer["began_at"], queued)

    def _report(self) -> Doc:
        writer = self._writer = self._begin()
        # What failed elsewhere is about to fail here: before it has, nobody can go on.
        told = [order for order in writer.unsettled if order.is_told]
        writer.wait_for(lambda: all(order.is_settled for order in told), self._settled_s)
        writer.look()
        if self._when_busy == "wait":
            writer.wait_for(lambda: not self._is_busy or bool(writer.failed), None)
        failed = {order.snapshot: self._failure_doc(order) for order in writer.failed}
        if not failed:
            writer.ensure()
            self._pause()
        return {
            **self._saver,
            "failed": failed,
            "committed": [order.snapshot for order in writer.orders if order.is_committed],
            "busy": self._is_busy,
            "paused": self._paused.snapshot if self._paused is not None else "",
            "joined": writer.joined,
            "host": self._ranks.channel.host,
            "newest_at": writer.newest_at,
        }

    @property
    def _is_busy(self) -> bool:
        return len(self._writer.unsettled) >= NUM_ARENAS

    @property
    def _settled_s(self) -> float:
        config = self._ranks.config
        return 2 * config.silence_s + config.arrive_s

    def _pause(self) -> None:
        unsettled = self._writer.unsettled
        if self._when_busy == "supersede" and unsettled and self._writer.pause(unsettled[-1]):
            self._paused = unsettled[-1]

    def _failure_doc(self, order: Order) -> Doc:
        assert order.failure is not None
        channel = self._ranks.channel
        failure = failure_of(order.failure, rank=channel.rank, host=channel.host, phase="write")
        return asdict(failure)

    def _decide(self, payloads: Sequence[Doc]) -> Doc:
        check_alike("AsyncSaver.save", payloads, ALIKE)
        committed = {snapshot for payload in payloads for snapshot in payload["committed"]}
        failed = {
            snapshot: failure
            for snapshot, failure in _failed(payloads).items()
            if snapshot not in committed
        }
        is_busy = any(payload["busy"] for payload in payloads)
        paused = {payload["paused"] for payload in payloads}
        goes_on = not failed and not (is_busy and self._when_busy == "skip")
        return {
            "failed": failed,
            "committed": sorted(committed),
            "skipped": not goes_on,
            # All ranks or none: else the writers of some would wait for those of others.
            "queued": paused.pop() if is_busy and len(paused) == 1 else "",
            "store": self._store(payloads) if goes_on else _NOWHERE,
            "began_at": max(
                time.time(), max(payload["newest_at"] for payload in payloads) + _LATER_S
            ),
        }

    def _store(self, payloads: Sequence[Doc]) -> tuple[str, int, bytes]:
        """Return where all writers meet: where they have met before, or in a new store."""
        if len(payloads) == 1:
            return _NOWHERE
        joined = payloads[0]["joined"]
        if joined is not None and all(payload["joined"] == joined for payload in payloads):
            host, port, token = joined
            return host, port, token
        own = payloads[0]["host"]
        others = [payload["host"] for payload in payloads if payload["host"] != own]
        return self._writer.serve(others[0] if others else "")

    def _learn(self, committed: Sequence[str]) -> bool:
        """Take note of what was committed though the writer here died before it could say so."""
        mistaken = [order for order in self._writer.failed if order.snapshot in committed]
        for order in mistaken:
            order.is_told = True
            _log.warning("a background save is committed, as other ranks say: %s", order.failure)
        return bool(mistaken)

    def _raise(self, failed: Doc) -> None:
        """Raise the failures; here too they count as told, if they are known yet or not."""
        for order in self._writer.orders:
            if order.snapshot in failed:
                order.is_told = True
        self._writer.forget_told()
        error = first_error([error_in(one) for one in failed.values()])
        error.add_note("That was an earlier save. This one was not begun: save again.")
        raise error


def _checked_store(doc: Doc) -> tuple[str, int, bytes]:
    """Return where the writers meet. RankError if that is no address and no token."""
    match doc:
        case [str(host), int(port), bytes(token)]:
            is_place = 0 < len(host) <= MAX_HOST_CHARS and 0 < port < 1 << 16
            if (is_place and len(token) == TOKEN_NBYTES) or (host, port, token) == _NOWHERE:
                return host, port, token
    raise RankError(
        f"rank 0 has told no place where the background writers can meet. {OF_THE_JOB.strange}",
        rank=COORDINATOR,
    )


def _failed(payloads: Sequence[Doc]) -> dict[str, Doc]:
    """Return why each save has failed, by its snapshot; the oldest save first.

    The rank to which it happened knows best: the others may have seen no more than that it is gone.
    """
    reports: dict[str, list[tuple[bool, int, Doc]]] = {}
    for rank, payload in enumerate(payloads):
        for snapshot, failure in payload["failed"].items():
            is_hearsay = failure["rank"] != rank
            reports.setdefault(snapshot, []).append((is_hearsay, rank, failure))
    return {snapshot: min(told, key=lambda one: one[:2])[2] for snapshot, told in reports.items()}
