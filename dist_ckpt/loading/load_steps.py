"""A load as a sequence of exchanges: open, check, then prepare, read, place and load objects.

Until every rank has passed the check nothing that the caller holds is touched; afterwards each
step begins only when the one before has succeeded everywhere. A step in which no rank has anything
to do is left out: in the check all ranks learn which.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from dist_ckpt import commit
from dist_ckpt.comm.exchange import Doc, check_alike
from dist_ckpt.comm.session import Session
from dist_ckpt.commit.attempts import is_there, while_it_is_there
from dist_ckpt.errors import IncompatibleError, NotFoundError, StorageError, listed, ranks_text
from dist_ckpt.format import filenames, index_json
from dist_ckpt.format.filenames import Attempt
from dist_ckpt.format.index import Index, Key
from dist_ckpt.planning import plan_msgpack
from dist_ckpt.planning.read_sharing import BlockWants, decode, want_the_same
from dist_ckpt.shard_io.block_reader import ReadTotals
from dist_ckpt.storage import Storage

# Where what several ranks want is fetched from storage once: on each host, or in the whole job.
ReadOnce = Literal["host", "job", "off"]

# What the coordinator takes from all ranks, or hands to all of them, in an exchange; more than
# that comes by a bulk collective, whose cost does not grow with the ranks.
MAX_SPREAD_NBYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """What a rank asks for: path and options, the same on all, and its per-rank templates' keys."""

    storage: Storage
    path: str
    strict: bool
    check_first: bool
    read_once: ReadOnce
    keys: Mapping[str, Key]


@dataclass(frozen=True, slots=True)
class Found:
    """The checkpoint that all ranks load, and the keys that their per-rank templates have.

    `meeting` is a name for what the ranks share when they read; "" if they can share nothing.
    """

    attempt: Attempt
    index: Index
    keys: Mapping[str, Sequence[Key]]
    meeting: str


@dataclass(frozen=True, slots=True)
class Findings:
    """What one rank's check found: what is wrong, and the saved names that it does not ask for.

    `steps` are those that it has something to do in. `wants` say what it reads, as a message; ""
    if the ranks can share nothing. `from_memory`: some of it not from the storage.
    """

    problems: tuple[str, ...]
    unclaimed: tuple[str, ...]
    steps: frozenset[str] = frozenset()
    wants: bytes = b""
    from_memory: bool = False


@dataclass(frozen=True, slots=True)
class Passed:
    """What all ranks know of each other when they have passed the check.

    `unexpected` are the saved names that none of them asks for, `steps` those that some rank has
    something to do in. `shares`: some read the same, as far as is known, and can hand it on; then
    `wants` are what each reads, and empty if that is yet to be gathered. `from_memory`: some rank
    reads some of it not from the storage.
    """

    unexpected: tuple[str, ...]
    steps: frozenset[str]
    shares: bool
    wants: Mapping[int, BlockWants]
    from_memory: bool


@dataclass(frozen=True, slots=True)
class JobTotals:
    """What reading came to over all ranks; rank `slowest_rank` took longest."""

    nbytes_read: int
    nbytes_placed: int
    slowest_rank: int
    slowest_s: float


class LoadRun:
    """One load in progress, as one rank sees it: `open`, `check`, then `step` by step."""

    def __init__(self, ranks: Session) -> None:
        self._ranks = ranks
        self._round = 0
        self._request: LoadRequest
        self._attempt: Attempt
        self._index: Index | None
        self._answer: Doc

    def open(self, request: Callable[[], LoadRequest]) -> None:
        """Find the checkpoint, and hand its index to all. Collective: every rank calls this."""
        ranks = self._ranks

        def describe() -> Doc:
            self._request = asked = request()
            keys = plan_msgpack.pack(tuple(asked.keys.items()))
            return {
                "path": asked.path,
                "strict": asked.strict,
                "check_first": asked.check_first,
                "read_once": asked.read_once,
                "host": ranks.channel.host,
                "keys": keys,
                "bulk": ranks.bulk_epoch,
            }

        index: Index | None = None
        encoded = b""

        def find(payloads: Sequence[Doc]) -> Doc:
            nonlocal index, encoded
            check_alike("load", payloads, ("path", "strict", "check_first", "read_once"))
            attempt, index = commit.find(self._request.storage, self._request.path)
            keys = _merge_keys(
                [plan_msgpack.unpack(payload["keys"], tuple) for payload in payloads]
            )
            bulk = max(payload["bulk"] for payload in payloads)
            meeting = os.urandom(16).hex() if _can_share(payloads) else ""
            if len(payloads) > 1:
                encoded = index_json.encode(index)
            is_short = len(encoded) * len(payloads) <= MAX_SPREAD_NBYTES
            return {
                "index": encoded if is_short else None,
                "attempt": attempt.name,
                "keys": plan_msgpack.pack(keys),
                "bulk": bulk,
                "meeting": meeting,
            }

        self._round += 1
        self._answer = answer = ranks.channel.exchange(self._phase("open"), describe, find)
        ranks.bulk_epoch = answer["bulk"]
        attempt = filenames.parse_attempt(answer["attempt"])
        assert attempt is not None
        self._attempt = attempt
        self._index = index
        if answer["index"] is None:
            self._broadcast(encoded)

    def _broadcast(self, encoded: bytes) -> None:
        """Hand all ranks an index that is too long for the answer."""

        def receive() -> Doc:
            data = self._ranks.bulk().broadcast(encoded or None)
            self._index = self._index or _decoded(data)

        self._ranks.channel.exchange(self._phase("index"), receive, lambda _: None)

    def _found(self) -> Found:
        answer = self._answer
        if self._index is None:
            self._index = _decoded(answer["index"])
        return Found(
            attempt=self._attempt,
            index=self._index,
            keys=dict(plan_msgpack.unpack(answer["keys"], tuple)),
            meeting=answer["meeting"],
        )

    def check(
        self,
        examine: Callable[[Found], Findings],
        word_unexpected: Callable[[Sequence[str]], Sequence[str]],
    ) -> Passed | None:
        """Agree that all ranks can load. Collective: every rank calls this.

        None if the checkpoint was replaced or deleted meanwhile: `open` again. Raises
        IncompatibleError with every problem of every rank, on all ranks. `word_unexpected` says
        which problems unexpected names are.
        """
        asked = self._request
        names: tuple[str, ...] = ()

        def describe() -> Doc:
            nonlocal names
            found = self._found()
            catalog = found.index.catalog
            names = (*catalog.tensors, *catalog.aliases, *catalog.values, *catalog.per_rank)
            try:
                with while_it_is_there(asked.storage, asked.path, self._attempt):
                    findings = examine(found)
            except NotFoundError:
                return {"gone": True}
            is_short = len(findings.wants) * self._ranks.channel.world_size <= MAX_SPREAD_NBYTES
            return {
                "gone": False,
                "problems": list(findings.problems),
                "unclaimed": _bits_of(findings.unclaimed, names),
                "steps": sorted(findings.steps),
                "wants": findings.wants if is_short else None,
                "memory": findings.from_memory,
            }

        def judge(payloads: Sequence[Doc]) -> Doc:
            if gone := [rank for rank, payload in enumerate(payloads) if payload["gone"]]:
                self._check_shared(gone)
                return None
            unexpected = _in_all([payload["unclaimed"] for payload in payloads], names)
            problems = _merge_problems([payload["problems"] for payload in payloads])
            problems += word_unexpected(unexpected)
            if problems:
                raise IncompatibleError(self._message(problems))
            steps = {step for payload in payloads for step in payload["steps"]}
            shares, wants = self._in_common([payload["wants"] for payload in payloads])
            return {
                "unexpected": unexpected,
                "steps": sorted(steps),
                "shares": shares,
                "wants": wants,
                "memory": any(payload["memory"] for payload in payloads),
            }

        answer = self._ranks.channel.exchange(self._phase("check"), describe, judge)
        if answer is None:
            return None
        return Passed(
            unexpected=tuple(answer["unexpected"]),
            steps=frozenset(answer["steps"]),
            shares=answer["shares"],
            wants={rank: decode(want) for rank, want in enumerate(answer["wants"])},
            from_memory=answer["memory"],
        )

    def _in_common(self, wants: Sequence[bytes | None]) -> tuple[bool, Sequence[bytes]]:
        """Say whether ranks share what they read; return what all want if that can be handed out.

        They are taken to share where some want is too long to have come here.
        """
        told = [want for want in wants if want is not None]
        if len(told) < len(wants):
            return True, ()
        between_hosts = self._request.read_once == "job"
        if not all(told) or not want_the_same(map(decode, told), between_hosts=between_hosts):
            return False, ()
        is_short = sum(map(len, told)) * len(told) <= MAX_SPREAD_NBYTES
        # To gather them connects the hosts, which then send to each other.
        return True, told if is_short and not between_hosts else ()

    def _check_shared(self, gone: Sequence[int]) -> None:
        """Raise StorageError if only some ranks see the checkpoint's folder no more."""
        asked = self._request
        if is_there(asked.storage, asked.path, self._attempt):
            raise StorageError(
                f"{asked.path}/{self._attempt} is not seen by {ranks_text(gone)}, though the "
                "coordinator sees it: the path is not on storage that all ranks share. Pass a "
                "path that is"
            )

    def _phase(self, name: str) -> str:
        """Return a name that no earlier exchange of this load has had."""
        return name if self._round == 1 else f"{name} {self._round}"

    def _message(self, problems: Sequence[str]) -> str:
        lines = listed(["", *problems], "\n  - ")
        return f"{self._request.path} does not fit the state; nothing was changed:{lines}"

    def step(
        self,
        phase: str,
        work: Callable[[], Doc],
        judge: Callable[[Sequence[Doc]], Doc] = lambda _: None,
    ) -> Doc:
        """Do one step of the load on all ranks, or raise what any rank raised. Collective."""
        return self._ranks.channel.exchange(phase, work, judge)

    def read(self, work: Callable[[], ReadTotals]) -> JobTotals:
        """Read on all ranks, as one `step`; return what it came to over all of them. Collective."""

        def timed() -> Doc:
            start = time.monotonic()
            totals = work()
            return [totals.nbytes_read, totals.nbytes_placed, time.monotonic() - start]

        def sum_up(payloads: Sequence[Doc]) -> Doc:
            nbytes_read, nbytes_placed, seconds = zip(*payloads, strict=True)
            slowest = max(range(len(seconds)), key=lambda rank: seconds[rank])
            return [sum(nbytes_read), sum(nbytes_placed), slowest, seconds[slowest]]

        return JobTotals(*self._ranks.channel.exchange("read", timed, sum_up))


def _decoded(data: bytes) -> Index:
    index = index_json.decode(data)
    assert isinstance(index, Index)
    return index


def _can_share(payloads: Sequence[Doc]) -> bool:
    """Say whether some of the ranks can hand on to each other what they read."""
    mode = payloads[0]["read_once"]
    num_places = len({payload["host"] for payload in payloads}) if mode == "host" else 1
    return mode != "off" and num_places < len(payloads)


def _bits_of(some: Sequence[str], names: Sequence[str]) -> bytes:
    """Return which of the names are among some, one bit each.

    Lists of names would grow with tensors times ranks.
    """
    chosen = set(some)
    bits = "".join("1" if name in chosen else "0" for name in names)
    return int(f"0{bits}", 2).to_bytes((len(names) + 7) // 8, "big")


def _in_all(ranks: Sequence[bytes], names: Sequence[str]) -> list[str]:
    """Return the names that `_bits_of` has told of every rank."""
    common = -1
    for packed in ranks:
        common &= int.from_bytes(packed, "big")
    bits = f"{common:0{len(names)}b}"
    return [name for name, bit in zip(names, bits, strict=False) if bit == "1"]


def _merge_keys(ranks: Sequence[tuple[tuple[str, Key], ...]]) -> tuple[tuple[str, object], ...]:
    merged: dict[str, dict[Key, None]] = {}
    for keys in ranks:
        for fqn, key in keys:
            merged.setdefault(fqn, {})[key] = None
    return tuple((fqn, tuple(keys)) for fqn, keys in merged.items())


def _merge_problems(ranks: Sequence[Sequence[str]]) -> list[str]:
    """Say each problem once, and on which ranks it is where it is not on all of them."""
    found: dict[str, list[int]] = {}
    for rank, problems in enumerate(ranks):
        for problem in problems:
            found.setdefault(problem, []).append(rank)
    return [
        problem if len(who) == len(ranks) else f"{problem} ({ranks_text(who)})"
        for problem, who in found.items()
    ]
