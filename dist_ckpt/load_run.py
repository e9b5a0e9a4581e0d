"""A load as a sequence of exchanges: open, check, then read, place and load objects.

Until every rank has passed the check nothing that the caller holds is touched; afterwards each
step begins only when the one before has succeeded everywhere.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from dist_ckpt import commit, index_codec, paths, wire
from dist_ckpt.attempts import is_there, while_it_is_there
from dist_ckpt.channel import Doc
from dist_ckpt.coordinator import check_alike
from dist_ckpt.errors import IncompatibleError, NotFoundError, StorageError, listed, ranks_text
from dist_ckpt.index import Catalog, Index, Key
from dist_ckpt.paths import Attempt
from dist_ckpt.reader import ReadTotals
from dist_ckpt.session import Session
from dist_ckpt.storage import Storage

# Where what several ranks want is fetched from storage once: on each host, or in the whole job.
ReadOnce = Literal["host", "job", "off"]


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
    """What one rank's check found: what is wrong, and the saved names that it does not ask for."""

    problems: tuple[str, ...]
    unclaimed: tuple[str, ...]


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

    def open(self, request: Callable[[], LoadRequest]) -> Found:
        """Find the checkpoint, and hand its index to all. Collective: every rank calls this."""
        ranks = self._ranks

        def describe() -> Doc:
            self._request = asked = request()
            keys = wire.pack(tuple(asked.keys.items()))
            return {
                "path": asked.path,
                "strict": asked.strict,
                "check_first": asked.check_first,
                "read_once": asked.read_once,
                "host": ranks.channel.host,
                "keys": keys,
                "bulk": ranks.bulk_epoch,
            }

        found: tuple[Attempt, Index] | None = None

        def find(payloads: Sequence[Doc]) -> Doc:
            nonlocal found
            check_alike("load", payloads, ("path", "strict", "check_first", "read_once"))
            found = commit.find(self._request.storage, self._request.path)
            keys = _merge_keys([wire.unpack(payload["keys"], tuple) for payload in payloads])
            bulk = max(payload["bulk"] for payload in payloads)
            meeting = os.urandom(16).hex() if _can_share(payloads) else ""
            return {
                "attempt": found[0].name,
                "keys": wire.pack(keys),
                "bulk": bulk,
                "meeting": meeting,
            }

        self._round += 1
        answer = ranks.channel.exchange(self._phase("open"), describe, find)
        ranks.bulk_epoch = answer["bulk"]
        attempt = paths.parse_attempt(answer["attempt"])
        assert attempt is not None
        self._attempt = attempt
        index = self._share_index(None if found is None else found[1])
        return Found(attempt, index, dict(wire.unpack(answer["keys"], tuple)), answer["meeting"])

    def _share_index(self, index: Index | None) -> Index:
        """Broadcast the index: it is read once, whatever the number of ranks."""
        shared = index

        def receive() -> Doc:
            nonlocal shared
            if self._ranks.channel.world_size > 1:
                encoded = None if index is None else index_codec.encode(index)
                data = self._ranks.bulk().broadcast(encoded)
                decoded = index_codec.decode(data)
                assert isinstance(decoded, Index)
                shared = decoded
            return None

        self._ranks.channel.exchange(self._phase("index"), receive, lambda _: None)
        assert shared is not None
        return shared

    def check(
        self,
        catalog: Catalog,
        examine: Callable[[], Findings],
        word_unexpected: Callable[[Sequence[str]], Sequence[str]],
    ) -> tuple[str, ...] | None:
        """Agree that all ranks can load; return the names that none of them asks for. Collective.

        None if the checkpoint was replaced or deleted meanwhile: `open` again. Raises
        IncompatibleError with every problem of every rank, on all ranks. `word_unexpected` says
        which problems unexpected names are.
        """
        asked = self._request
        names = (*catalog.tensors, *catalog.aliases, *catalog.values, *catalog.per_rank)

        def describe() -> Doc:
            try:
                with while_it_is_there(asked.storage, asked.path, self._attempt):
                    findings = examine()
            except NotFoundError:
                return {"gone": True}
            unclaimed = set(findings.unclaimed)
            # One bit a name: lists of names would grow with tensors times ranks.
            bits = "".join("1" if name in unclaimed else "0" for name in names)
            size = (len(names) + 7) // 8
            packed = int(f"0{bits}", 2).to_bytes(size, "big")
            return {"gone": False, "problems": list(findings.problems), "unclaimed": packed}

        def judge(payloads: Sequence[Doc]) -> Doc:
            if gone := [rank for rank, payload in enumerate(payloads) if payload["gone"]]:
                self._check_shared(gone)
                return None
            common = -1
            for payload in payloads:
                common &= int.from_bytes(payload["unclaimed"], "big")
            bits = f"{common:0{len(names)}b}"
            unexpected = [name for name, bit in zip(names, bits, strict=False) if bit == "1"]
            problems = _merge_problems([payload["problems"] for payload in payloads])
            problems += word_unexpected(unexpected)
            if problems:
                raise IncompatibleError(self._message(problems))
            return unexpected

        unexpected = self._ranks.channel.exchange(self._phase("check"), describe, judge)
        return None if unexpected is None else tuple(unexpected)

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

    def step(self, phase: str, work: Callable[[], None]) -> None:
        """Do one step of the load on all ranks, or raise what any rank raised. Collective."""
        self._ranks.channel.exchange(phase, work, lambda _: None)

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


def _can_share(payloads: Sequence[Doc]) -> bool:
    """Say whether some of the ranks can hand on to each other what they read."""
    mode = payloads[0]["read_once"]
    num_places = len({payload["host"] for payload in payloads}) if mode == "host" else 1
    return mode != "off" and num_places < len(payloads)


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
