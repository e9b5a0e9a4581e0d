"""Requests to save or to stop: signals, and requests of other processes (`dist-ckpt request-save`).

A separate thread of rank 0 polls for requests of other processes and answers them. The thread of
the rounds must not wait for the storage, and the maintenance thread may prune for minutes. The
thread also writes the run's heartbeat. `RankRequests` collects all requests of this rank.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from dist_ckpt.checkpointer.barrier_rounds import BarrierProposal
from dist_ckpt.checkpointer.maintenance import MaintenanceThread
from dist_ckpt.checkpointer.save_policy import SavePolicy
from dist_ckpt.checkpointer.signals import Signals
from dist_ckpt.core.comm.exchange.channel import COORDINATOR
from dist_ckpt.core.commit.records.incarnations import (
    LIVENESS_INTERVAL_S,
    Incarnation,
    LivenessFile,
)
from dist_ckpt.core.commit.records.protections import CheckpointKey
from dist_ckpt.core.format.filenames import answer_file, request_file
from dist_ckpt.core.format.run_records import Outcome, RequestRecord
from dist_ckpt.core.storage import Storage
from dist_ckpt.errors import CheckpointError, CorruptError, IncompatibleError
from dist_ckpt.runs.save_requests import (
    RequestNames,
    list_requests,
    put_answer,
    read_request,
    remove_request_file,
)

_log = logging.getLogger("dist_ckpt")


@dataclass
class RankRequests:
    """The requests of one rank, which the thread of the rounds calls. Calls do not wait.

    Every rank has requests by signals. Rank 0 also has those of its clock, of failed saves, and of
    other processes.
    """

    rank: int
    save: SavePolicy
    signals: Signals
    maintenance: MaintenanceThread | None = None
    external: ExternalRequests | None = None
    saved_at: float = field(default_factory=time.monotonic)
    refusal: BarrierProposal | None = None  # this rank's state cannot be saved

    def __call__(self) -> BarrierProposal | None:
        """Return the current proposal of this rank."""
        if self.signals.received is not None:
            why = f"{self.signals.received} on rank {self.rank}"
            waited_s = time.monotonic() - self.signals.received_at
            return BarrierProposal(self.rank, why, stops=True, waited_s=waited_s)
        if self.refusal is not None:
            return self.refusal
        for asker in (self.maintenance, self.external):
            if asker is not None and (proposal := asker.proposal()) is not None:
                return proposal
        if self.rank == COORDINATOR and self.save.is_time(time.monotonic() - self.saved_at):
            return BarrierProposal(self.rank, "the time")
        return None

    def begin_save(self, step: int, *, is_last: bool) -> None:
        """See `ExternalRequests.begin_save`."""
        if self.external is not None:
            self.external.begin_save(step, is_last=is_last)

    def finish(self, proposal: BarrierProposal | None) -> None:
        """Remove a proposal that is done, and restart the time since the last save."""
        self.saved_at = time.monotonic()
        if proposal is None:
            return
        if proposal.stops:
            self.signals.received = None
        if self.maintenance is not None:
            self.maintenance.finish(proposal)


# The interval at which the folder is polled for requests. It costs one listing.
REQUEST_CHECK_INTERVAL_S = 2.0

# The interval at which a requested save is polled, without a call of the storage.
REQUESTED_SAVE_CHECK_INTERVAL_S = 0.1

# The time after which this job removes answers, and requests that cannot be read.
ANSWER_TTL_S = 3600.0

# The length of a requester's name in a log.
MAX_NAME_CHARS = 200


class ExternalRequests:
    """Rank 0's thread for requests of other processes. It runs until `close`.

    Only `close` waits. Threads may share it.
    """

    def __init__(
        self, storage: Storage, incarnation: Incarnation, maintenance: MaintenanceThread
    ) -> None:
        self._storage, self._root = storage, incarnation.root
        self._number = incarnation.number
        self._maintenance = maintenance
        # The threads share these under the lock. Requests in `_open` wait for a boundary, and
        # requests in `_saving` wait for the save of a step.
        self._changed = threading.Condition()
        self._open: dict[str, RequestRecord] = {}
        self._saving: dict[str, int] = {}
        self._last_step: int | None = None  # of the run
        self._end_reason: str | None = None
        # For the thread only: finished requests, unreadable ones, and the first sight of files.
        self._done: set[str] = set()
        self._damaged: set[str] = set()
        self._seen_at: dict[str, float] = {}
        self._has_warned = False
        name = "dist_ckpt requests"
        self._thread = threading.Thread(target=self._run_thread, name=name, daemon=True)
        self._thread.start()

    def proposal(self) -> BarrierProposal | None:
        """Return the proposal for the open requests, if any."""
        with self._changed:
            requests = [*self._open.values()]
        if not requests:
            return None
        names = ", ".join(sorted({request.by[:MAX_NAME_CHARS] for request in requests}))
        stops = any(request.stops for request in requests)
        return BarrierProposal(COORDINATOR, f"a request of {names}"[:MAX_NAME_CHARS], stops=stops)

    def begin_save(self, step: int, *, is_last: bool) -> None:
        """Assign the open requests to this step, which all ranks have begun to save or have saved.

        `is_last`: the run ends there. Otherwise requests to stop stay open.
        """
        with self._changed:
            if is_last:
                self._last_step = step
            for request in [*self._open.values()]:
                if is_last or not request.stops:
                    del self._open[request.id]
                    self._saving[request.id] = step
            self._changed.notify()

    def close(self, end_reason: str, timeout_s: float) -> None:
        """Answer all requests within `timeout_s`, and end. Idempotent.

        Call this when the saves are settled, or when no time is left to wait for them.
        """
        with self._changed:
            self._end_reason = self._end_reason or end_reason
            self._changed.notify()
        self._thread.join(timeout_s)

    # --- the thread ------------------------------------------------------------------------------

    def _run_thread(self) -> None:
        next_read, next_renewal = 0.0, 0.0
        liveness = LivenessFile(self._storage, self._root, self._number)
        while self._end_reason is None:
            is_fine = True
            if time.monotonic() >= next_renewal:
                self._call_logged(liveness.renew)
                next_renewal = time.monotonic() + LIVENESS_INTERVAL_S
            if time.monotonic() >= next_read:
                is_fine = self._call_logged(self._read_requests)
                next_read = time.monotonic() + REQUEST_CHECK_INTERVAL_S
            is_fine = self._call_logged(self._answer_settled) and is_fine
            with self._changed:
                if self._end_reason is None:
                    self._changed.wait(
                        REQUESTED_SAVE_CHECK_INTERVAL_S
                        if self._saving and is_fine
                        else REQUEST_CHECK_INTERVAL_S
                    )
        for act in (self._read_requests, self._answer_settled, self._answer_all, liveness.end):
            self._call_logged(act)

    def _call_logged(self, act: Callable[[], None]) -> bool:
        """Call a function and log its error. Return False after an error: call again later."""
        try:
            act()
        except (CheckpointError, OSError) as error:
            level = logging.DEBUG if self._has_warned else logging.WARNING
            _log.log(level, "requests to save cannot be read or answered now: %s", error)
            self._has_warned = True
        except Exception:  # noqa: BLE001 - a thread's outer edge
            _log.exception("requests to save cannot be read or answered now")
        else:
            return True
        return False

    def _read_requests(self) -> None:
        """Read new requests, drop withdrawn ones, and prune old files."""
        names = list_requests(self._storage, self._root)
        unanswered = set(names.requests) - set(names.answers)
        with self._changed:
            self._open = {key: value for key, value in self._open.items() if key in unanswered}
            new = unanswered - self._done - set(self._open) - set(self._saving)
        for request_id in sorted(new):
            try:
                request = read_request(self._storage, self._root, request_id)
            except (CorruptError, IncompatibleError) as error:
                _log.warning("a request to save cannot be read, and is ignored: %s", error)
                self._done.add(request_id)
                self._damaged.add(request_id)
                continue
            if request is not None:
                self._add(request)
        self._prune(names)
        self._has_warned = False

    def _add(self, request: RequestRecord) -> None:
        if request.incarnation == self._number:
            end = " and the end" * request.stops
            _log.info("%s requests a save%s", request.by[:MAX_NAME_CHARS], end)
            with self._changed:
                if self._last_step is None:
                    self._open[request.id] = request
                else:
                    self._saving[request.id] = self._last_step
        elif request.incarnation < self._number:
            why = f"incarnation {self._number} of the run has begun since: send it another request"
            self._answer(request.id, "ended", why)
        else:  # for the job that has taken over
            self._done.add(request.id)

    def _prune(self, names: RequestNames) -> None:
        """Remove old answers and unreadable requests: a request before its answer."""
        finished = self._damaged.union(names.answers)
        files = [request_file(name) for name in names.requests if name in finished]
        files += [*map(answer_file, names.answers), *names.temporary]
        now = time.monotonic()
        self._seen_at = {name: self._seen_at.get(name, now) for name in files}
        for name in files:
            if now - self._seen_at[name] > ANSWER_TTL_S:
                remove_request_file(self._storage, self._root, name)

    def _answer_settled(self) -> None:
        """Answer the requests whose save is durable or has failed."""
        with self._changed:
            saving = dict(self._saving)
        for request_id, step in saving.items():
            outcome = self._maintenance.outcome(step)
            if isinstance(outcome, str):
                self._answer(request_id, "failed", outcome)
            elif outcome is not None:
                self._answer(request_id, "saved", f"step {outcome[0]} is durable", outcome)

    def _answer_all(self) -> None:
        """Answer all other requests: the run has ended."""
        with self._changed:
            rest = [*self._saving, *self._open]
        for request_id in rest:
            durable = self._maintenance.durable
            self._answer(request_id, "ended", f"{self._end_reason}. Newest durable save: {durable}")

    def _answer(
        self, request_id: str, outcome: Outcome, why: str, saved: CheckpointKey | None = None
    ) -> None:
        put_answer(self._storage, self._root, request_id, outcome, why, saved)
        self._done.add(request_id)  # a listing may not have the answer yet
        with self._changed:
            self._open.pop(request_id, None)
            self._saving.pop(request_id, None)
