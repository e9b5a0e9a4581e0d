"""Detect dead and late ranks by their heartbeats and processes, and pace the polls of a wait.

A thread of Python sends the heartbeats. It does not run while other code has the interpreter's
lock, or while the process is stopped. So silence alone does not mean death: then this module looks
at the process. A rank of the same machine reads `/proc`. For another machine, a rank that runs
there reads it when it is asked, and answers through the store. If none answers, because no rank
there runs Python, the kernel there does: it answers at the rank's liveness port.

If the store does not answer, a rank closes this port, and renames its heartbeat thread. Other ranks
read that name in `/proc`. If that thread has ended, the rank counts as cut off too.

| Silence of a rank, as a share of `heartbeat_timeout_s` | What happens |
| --- | --- |
| `LOOK_AFTER` | look at its process |
| `PROBE_AFTER` | look at its liveness port, if its process could not be seen |
| 1 | it is lost. If it was seen alive, it is late, and lost after `late_timeout_s` |
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from dist_ckpt.core.comm.key_value import client_thread
from dist_ckpt.core.comm.key_value.client_thread import Store, StoreClientThread
from dist_ckpt.core.comm.rank_messages import Heartbeat, Question, Sighting, unpack
from dist_ckpt.core.runtime.network import ANSWER_S, find_listening
from dist_ckpt.core.runtime.processes import ProcessId, ProcessState, find_state, running_time
from dist_ckpt.core.runtime.typed_msgpack import encode
from dist_ckpt.message_text import ranks_text
from dist_ckpt.settings import Settings

# With more ranks, each rank polls less often, since all of them use one store.
MAX_POLLS_PER_S = 20_000

# The shares of the heartbeat timeout in the table above.
LOOK_AFTER = 0.5
PROBE_AFTER = 0.75

# A waiting rank reads the heartbeats at least this often in one timeout.
READS_PER_TIMEOUT = 10

# One read of the heartbeats counts at most this share of the timeout as silence.
MAX_COUNTED = 0.25

# A pause lasts this share of the time waited so far. So a wait ends late by at most this share.
OVERSHOOT = 0.15


class PollInterval:
    """The intervals of one wait: polls become rarer; heartbeats are read at regular intervals."""

    def __init__(self, world_size: int, settings: Settings) -> None:
        self._max_pause_s = max(0.02, world_size / MAX_POLLS_PER_S)
        self._min_pause_s = max(0.0003, self._max_pause_s / 100)
        joining_s = min(settings.join_warning_s / 2, settings.join_timeout_s / 4)
        self._look_s = min(1.0, settings.heartbeat_timeout_s / READS_PER_TIMEOUT, joining_s)
        self._began_at = running_time()
        self._next_read_at = self._began_at + self._look_s
        self._compare_s, self._next_comparison_at = settings.join_warning_s, settings.join_warning_s
        self.has_warned = False

    @property
    def waited_s(self) -> float:
        """How long the wait has lasted."""
        return running_time() - self._began_at

    def pause(self) -> None:
        """Sleep until the next poll."""
        time.sleep(min(max(self._min_pause_s, OVERSHOOT * self.waited_s), self._max_pause_s))

    def is_look_due(self) -> bool:
        """Return True, at intervals, if it is time to read the heartbeats."""
        now = running_time()
        if now < self._next_read_at:
            return False
        self._next_read_at = now + self._look_s
        return True

    def is_compare_due(self) -> bool:
        """Return True, each `join_warning_s`, if it is time to compare the calls of the ranks."""
        if self.waited_s < self._next_comparison_at:
            return False
        self._next_comparison_at = self.waited_s + self._compare_s
        return True


# How long a rank that missed an operation waits for the others to begin the next one. If they do,
# the rank's own call belongs to the next operation.
NEXT_OPERATION_WAIT_S = 1.0


@dataclass(slots=True)
class _LastSeen:
    """A rank's last heartbeat, None if it is not valid, and for how long it has not changed.

    `state` is the last known state of its process. `looked_at_s` is `silent_s` at the last look at
    the process, `alive_at_s` at the last look that found it alive; 0 before such a look.
    `was_listening`: its liveness port has answered.
    """

    data: bytes
    beat: Heartbeat | None
    seen_at: float
    silent_s: float = 0.0
    state: ProcessState = "unknown"
    looked_at_s: float = 0.0
    alive_at_s: float = 0.0
    was_listening: bool = False
    is_logged: bool = False


_FACTS: Mapping[ProcessState, str] = {
    "ended": ", and its process has ended",
    "ending": ", and its process ends: it was killed, or dumps core",
    "blocked": ", and its process is in a call of the kernel that does not return",
    "cut off": ", and its process lives, but is cut off from the key-value store",
    "closed": ", and its port is closed: it has ended, or is cut off from the key-value store",
}

_FINAL: Collection[ProcessState] = ("ended", "ending", "cut off", "closed")

# These states come from /proc, and the port must not replace them: it is still open in a process
# that dumps core.
_STATES_FROM_PROC: Collection[ProcessState] = ("ended", "ending", "cut off", "blocked")


class ProcessWitness:
    """Looks at processes of this machine when ranks of other machines ask for them.

    The thread of the heartbeats calls it. `prefix` begins the keys, and is "" before the first
    operation.
    """

    def __init__(self, process: ProcessId | None) -> None:
        self._process = process
        self.machine = "" if process is None else process.machine
        self.prefix = ""
        self._asked = b""
        self._count = 0

    def __call__(self, store: Store) -> None:
        """Answer a new question. Data that is not a question is ignored."""
        if self._process is None or not self.prefix:
            return
        ask_key, answer_key = _witness_keys(self.prefix, self._process.machine)
        (data,) = client_thread.get_each(store, [ask_key])
        if data is None or data == self._asked:
            return
        self._asked = data
        self._count += 1
        with suppress(ValueError):
            asked = unpack(data, Question).processes[:MAX_ASKED]
            states = tuple((process, find_state(*process)) for process in asked)
            sighting = Sighting(self._process.pid, self._count, states)
            client_thread.put(store, answer_key, encode(sighting))


# More than the ranks of a host.
MAX_ASKED = 256

# The ports that are looked at together. Each takes a file descriptor for a moment.
MAX_PROBED = 64


def _witness_keys(prefix: str, machine: str) -> tuple[str, str]:
    return f"{prefix}/ask/{machine}", f"{prefix}/sighting/{machine}"


def _find_listening(addresses: Sequence[str]) -> dict[str, bool]:
    """Look at the first ports, and at more as long as they answer soon."""
    found: dict[str, bool] = {}
    until = time.monotonic() + ANSWER_S
    for start in range(0, len(addresses), MAX_PROBED):
        found |= find_listening(addresses[start : start + MAX_PROBED])
        if time.monotonic() >= until:
            break
    return found


class FailureDetector:
    """Detects lost ranks by their heartbeats; `beat_key` returns the key of a rank's heartbeat.

    Silence counts only while this rank watches, and each read adds a limited time. So a pause of
    this process, or of the whole machine, makes no other rank seem dead. `witness` is the one
    of this rank.
    """

    def __init__(
        self,
        client: StoreClientThread,
        beat_key: Callable[[int], str],
        settings: Settings,
        witness: ProcessWitness | None = None,
    ) -> None:
        self._client = client
        self._beat_key = beat_key
        self._witness = witness or ProcessWitness(None)
        # The last question and answer about each other machine.
        self._seen_notes: dict[str, tuple[bytes | None, bytes | None]] = {}
        self._heartbeat_timeout_s = settings.heartbeat_timeout_s
        self._late_timeout_s = settings.late_timeout_s
        self._grace_s = min(NEXT_OPERATION_WAIT_S, settings.heartbeat_timeout_s / 4)
        self._max_counted_s = MAX_COUNTED * settings.heartbeat_timeout_s
        self._last_seen: dict[int, _LastSeen] = {}

    def read_heartbeats(self, ranks: Sequence[int]) -> None:
        """Read the heartbeats of some ranks once."""
        keys = [self._beat_key(rank) for rank in ranks]
        for rank, data in zip(ranks, self._client.call(client_thread.get_each, keys), strict=True):
            now, last = time.monotonic(), self._last_seen.get(rank)
            if data is not None and (last is None or last.data != data):
                beat = None
                with suppress(ValueError):  # it is not a heartbeat
                    beat = unpack(data, Heartbeat)
                self._last_seen[rank] = _LastSeen(data, beat, now)
            elif data is not None and last is not None:
                last.silent_s += min(now - last.seen_at, self._max_counted_s)
                last.seen_at = now
        self._look_at_processes(ranks)
        self._look_at_ports(ranks)

    def _look_at_processes(self, ranks: Sequence[int]) -> None:
        """Look at the processes of ranks that have been silent for `LOOK_AFTER` of the timeout."""
        look_after_s = LOOK_AFTER * self._heartbeat_timeout_s
        by_machine: defaultdict[str, dict[tuple[int, int, int], _LastSeen]] = defaultdict(dict)
        for rank in ranks:
            last = self._last_seen.get(rank)
            if last is None or last.beat is None or last.silent_s < look_after_s:
                continue
            if (process := last.beat.process) is not None:
                key = process.pid, process.started, last.beat.thread
                by_machine[process.machine][key] = last
        for machine, silent in by_machine.items():
            if machine == self._witness.machine:
                states = tuple((process, find_state(*process)) for process in silent)
            else:
                states = self._ask_witness(machine, silent)
            for found, state in states:
                if (last := silent.get(found)) is not None and state != "unknown":
                    last.state, last.looked_at_s = state, last.silent_s
                    if state in ("running", "stopped"):
                        last.alive_at_s = last.silent_s

    def _look_at_ports(self, ranks: Sequence[int]) -> None:
        """Look at the liveness ports of silent ranks if the ranks of their hosts do not answer."""
        timeout_s = self._heartbeat_timeout_s
        unseen: dict[str, _LastSeen] = {}
        for rank in ranks:
            last = self._last_seen.get(rank)
            if last is None or last.beat is None or not last.beat.address:
                continue
            # The ranks of its machine have had time to answer.
            is_unseen = last.silent_s - last.looked_at_s >= LOOK_AFTER * timeout_s
            is_due = is_unseen and last.silent_s >= PROBE_AFTER * timeout_s
            if is_due and last.state not in _STATES_FROM_PROC:
                unseen[last.beat.address] = last
        oldest = sorted(unseen, key=lambda address: unseen[address].alive_at_s)
        for address, is_listening in _find_listening(oldest).items():
            last = unseen[address]
            if is_listening:
                last.state, last.alive_at_s, last.was_listening = "running", last.silent_s, True
            elif last.was_listening or not last.alive_at_s:
                last.state = "closed"

    def _ask_witness(
        self, machine: str, processes: Collection[tuple[int, int, int]]
    ) -> tuple[tuple[tuple[int, int, int], ProcessState], ...]:
        """Ask the ranks of another machine. Return a new sighting, () if none has come yet."""
        ask_key, answer_key = _witness_keys(self._witness.prefix, machine)
        asked, answer = self._client.call(client_thread.get_each, [ask_key, answer_key])
        earlier = self._seen_notes.get(machine)
        self._seen_notes[machine] = asked, answer
        question = Question(0, ())
        with suppress(ValueError):
            question = unpack(asked or b"", Question)
        # Others may ask too. One new question for each answer is enough.
        if earlier is None or asked == earlier[0] or not set(processes) <= set(question.processes):
            union = dict.fromkeys((*question.processes, *processes))
            question = Question(question.count + 1, tuple(union)[-MAX_ASKED:])
            self._client.call(client_thread.put, ask_key, encode(question))
        # Before the first look an answer may be old.
        if earlier is not None and answer is not None and answer != earlier[1]:
            with suppress(ValueError):
                return unpack(answer, Sighting).states
        return ()

    def last_heartbeat(self, rank: int) -> Heartbeat | None:
        """Return the last heartbeat of a rank; None if it was never seen, or is not valid."""
        last = self._last_seen.get(rank)
        return last.beat if last else None

    def has_invalid_heartbeat(self, rank: int) -> bool:
        """Return True if a rank's heartbeat is not a valid one."""
        return rank in self._last_seen and self.last_heartbeat(rank) is None

    def is_waiting(self, rank: int, number: int, turn: int) -> bool:
        """Return True if a rank was last seen alive within this operation.

        A rank that received the failure of this turn's exchange does not wait any more.
        """
        beat = self.last_heartbeat(rank)
        return (
            beat is not None
            and (beat.number, beat.inside, beat.gone) == (number, True, False)
            and beat.failed_turn < turn
            and self._last_seen[rank].silent_s < self._heartbeat_timeout_s
        )

    def find_loss(self, rank: int, number: int, *, was_in: bool) -> str | None:
        """Return why a rank is lost for this operation, or None; `was_in`: the rank had entered."""
        beat = self.last_heartbeat(rank)
        if beat is None:
            return None
        if beat.gone:
            return "has ended"
        if loss := self._find_silent_loss(rank):
            return loss
        if beat.number > number or (beat.number == number and not beat.inside):
            return "is no longer taking part: it raised an error or was interrupted"
        if was_in and beat.number < number:
            return "has restarted"
        return None

    def _find_silent_loss(self, rank: int) -> str:
        """Return why a silent rank is lost; "" if it is only late, or not silent."""
        last, lateness = self._last_seen[rank], self.find_lateness(rank)
        if last.silent_s < (self._late_timeout_s if lateness else self._heartbeat_timeout_s):
            return ""
        if lateness:
            return lateness
        fact = f"is dead or frozen: no heartbeat for {self._heartbeat_timeout_s:g} s"
        return fact + _FACTS.get(last.state, "")

    def find_lateness(self, rank: int) -> str:
        """Describe a silent rank if its process was seen alive since. Return "" otherwise."""
        last = self._last_seen.get(rank)
        if last is None or last.silent_s < self._heartbeat_timeout_s or not last.alive_at_s:
            return ""
        is_old = last.silent_s - last.alive_at_s >= self._heartbeat_timeout_s
        if is_old or last.state in _FINAL:
            return ""
        state = "is stopped, and" if last.state == "stopped" else "is alive, but"
        return f"{state} has not run Python for {last.silent_s:.0f} s"

    def log_once(self, rank: int) -> bool:
        """Record that a late rank is logged. Return True the first time that it is late."""
        last = self._last_seen[rank]
        is_new, last.is_logged = not last.is_logged, True
        return is_new

    def find_newer_operation(self, ranks: Sequence[int], number: int) -> int | None:
        """Return a later operation that one of these ranks is in or soon enters; None if none."""
        until = running_time() + self._grace_s
        while True:
            self.read_heartbeats(ranks)
            for rank in ranks:
                beat = self.last_heartbeat(rank)
                if beat is not None and beat.number > number and beat.inside and not beat.gone:
                    return beat.number
            if running_time() >= until:
                return None
            time.sleep(0.02)

    def describe_ranks(self, ranks: Sequence[int]) -> str:
        """Return the names of ranks, a single one with its host if known: "rank 2 (host b)"."""
        beat = self.last_heartbeat(ranks[0]) if len(ranks) == 1 else None
        return ranks_text(ranks) + (f" (host {beat.host})" if beat else "")
