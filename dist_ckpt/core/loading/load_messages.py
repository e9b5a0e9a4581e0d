"""What the ranks of a load tell each other, and what the coordinator makes of it.

An opening, which finds the checkpoint; a check, after which every rank knows that all can load and
which steps are left; and what reading came to.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from dist_ckpt.core.checkpoint.open_checkpoint import OpenCheckpoint, Opener
from dist_ckpt.core.comm.exchange.channel import check_equal_on_all_ranks
from dist_ckpt.core.commit import attempts
from dist_ckpt.core.format.filenames import Attempt
from dist_ckpt.core.format.index import index_json
from dist_ckpt.core.format.index.index import Index, Key
from dist_ckpt.core.loading.load_options import ReadOnce
from dist_ckpt.core.loading.shared_read_group import common_bits, fits_exchange
from dist_ckpt.core.planning.selection import unmatched_on_all
from dist_ckpt.core.runtime.typed_msgpack import Message
from dist_ckpt.core.state.binding.bind import unexpected_problem
from dist_ckpt.core.state.tensors.plain_torch import make
from dist_ckpt.core.storage import Storage
from dist_ckpt.errors import (
    CheckpointError,
    IncompatibleError,
    StorageError,
    listed,
    ranks_text,
)
from dist_ckpt.reports import slowest_of

_log = logging.getLogger("dist_ckpt")


class LoadRequest(Message, frozen=True):
    """What a rank asks for, up to `read_once` the same on all. Of several sources `path` has all.

    `sources` are the key and the path of each, in order. `keys` are those of its per-rank
    templates; `bulk` numbers the bulk connections.
    """

    path: str | tuple[str, ...]
    sources: tuple[tuple[str, str], ...]
    strict: bool
    check_first: bool
    read_once: ReadOnce
    host: str
    keys: tuple[tuple[str, Key], ...]
    bulk: int

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of all sources."""
        return (self.path,) if isinstance(self.path, str) else self.path


class OpenedMessage(Message, frozen=True):
    """The checkpoints that all ranks load: the path and the attempt of each.

    `indexes` are theirs, or None if they come by a broadcast. `keys` are the keys that the ranks'
    per-rank templates have. `meeting` is a name for what the ranks share when they read; "" if they
    can share nothing.
    """

    attempts: tuple[tuple[str, Attempt], ...]
    indexes: tuple[bytes, ...] | None
    keys: dict[str, tuple[Key, ...]]
    bulk: int
    meeting: str


@dataclass(frozen=True, slots=True)
class ResolvedSources:
    """An `OpenedMessage`, decoded."""

    checkpoints: tuple[OpenCheckpoint, ...]
    keys: Mapping[str, Sequence[Key]]
    meeting: str

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all that was saved, those of several checkpoints one after another."""
        return tuple(name for one in self.checkpoints for name in one.names)

    def by_checkpoint(self, bits: int) -> list[tuple[OpenCheckpoint, list[str]]]:
        """Return which names of each checkpoint some bits tell of all `names`."""
        told = iter(f"{bits:0{len(self.names)}b}")
        return [
            (one, [name for name, bit in zip(one.names, told, strict=False) if bit == "1"])
            for one in self.checkpoints
        ]


class CheckFindings(Message, frozen=True):
    """What one rank's check found: what is wrong, and the saved names that it does not ask for.

    These are bits, by `bits_of`. `makes_memory`, `places`, `loads_objects`: which steps it has
    something to do in. `wants` say what it reads, b"" if the ranks can share nothing, None if it is
    too long to be told here. `from_memory`: some of it not from the storage. `is_gone`: the
    checkpoint is not there any more. `unmatched` are the problems of patterns that match nothing
    here.
    """

    problems: tuple[str, ...] = ()
    unmatched: tuple[str, ...] = ()
    unclaimed: bytes = b""
    makes_memory: bool = False
    places: bool = False
    loads_objects: bool = False
    wants: bytes | None = b""
    from_memory: bool = False
    is_gone: bool = False


class LoadDecision(Message, frozen=True):
    """What all ranks know of each other when they have passed the check.

    `unexpected` are the saved names that none of them asks for. `makes_memory`, `places` and
    `loads_objects`: some rank does; a step in which none has anything to do is left out. `shares`:
    some read the same, as far as is known, and can hand it on; then `wants` are what each reads,
    and empty if that is yet to be gathered. `from_memory`: some rank reads some of it not from the
    storage. `is_gone`: none of that, the checkpoint was replaced.
    """

    unexpected: tuple[str, ...] = ()
    makes_memory: bool = False
    places: bool = False
    loads_objects: bool = False
    shares: bool = False
    wants: tuple[bytes, ...] = ()
    from_memory: bool = False
    is_gone: bool = False


class RankTotals(Message, frozen=True):
    """What reading came to on one rank; `nbytes_received` came from other ranks."""

    nbytes_read: int
    nbytes_received: int
    nbytes_placed: int
    seconds: float


class JobTotals(Message, frozen=True):
    """What reading came to over all ranks; rank `slowest_rank` took longest."""

    nbytes_read: int
    nbytes_placed: int
    slowest_rank: int
    slowest_s: float


def find(
    storages: Sequence[Storage], told: Sequence[LoadRequest], opener: Opener, held: ExitStack
) -> tuple[OpenedMessage, tuple[OpenCheckpoint, ...], tuple[bytes, ...]]:
    """Find the checkpoints, each on its storage. Returns their indexes encoded, too, if asked for.

    That is if others are to have them. What is named by a selector is held until `held` ends. If
    several are not found, the error says all of them.
    """
    check_equal_on_all_ranks(
        "load", told, ("path", "sources", "strict", "check_first", "read_once")
    )
    found: list[OpenCheckpoint] = []
    errors: list[CheckpointError | ValueError] = []
    for storage, asked in zip(storages, told[0].paths, strict=True):
        try:
            path = opener.resolve(storage, asked, held)
            found.append(_opened(storage, path, *attempts.find(storage, path)))
        except (CheckpointError, ValueError) as error:
            errors.append(error)
    if len(errors) > 1:
        raise type(errors[0])("; ".join(map(str, errors))) from errors[0]
    if errors:
        raise errors[0]
    encoded = tuple(index_json.encode(one.index) for one in found) if len(told) > 1 else ()
    is_short = fits_exchange(sum(map(len, encoded)), len(told))
    opened = OpenedMessage(
        attempts=tuple((one.path, one.attempt) for one in found),
        indexes=encoded if is_short else None,
        keys=_merge_keys([one.keys for one in told]),
        bulk=max(one.bulk for one in told),
        meeting=os.urandom(16).hex() if _can_share(told) else "",
    )
    return opened, tuple(found), encoded


def found_in(
    opened: OpenedMessage,
    found: tuple[OpenCheckpoint, ...],
    encoded: Sequence[bytes],
    storages: Sequence[Storage],
) -> ResolvedSources:
    """Return what was found; the coordinator has it, others have the indexes encoded."""
    if not found:
        found = tuple(
            _decoded(storage, path, attempt, index)
            for storage, (path, attempt), index in zip(
                storages, opened.attempts, encoded, strict=True
            )
        )
    return ResolvedSources(found, opened.keys, opened.meeting)


def _decoded(storage: Storage, path: str, attempt: Attempt, encoded: bytes) -> OpenCheckpoint:
    index = index_json.decode(encoded)
    assert isinstance(index, Index)
    return _opened(storage, path, attempt, index)


def _opened(storage: Storage, path: str, attempt: Attempt, index: Index) -> OpenCheckpoint:
    return OpenCheckpoint(storage, path, attempt, index, make=make)


def decide_load(
    asked: LoadRequest, found: ResolvedSources, told: Sequence[CheckFindings]
) -> LoadDecision:
    """Return what all ranks are to know. IncompatibleError names every problem of every rank."""
    if gone := [rank for rank, one in enumerate(told) if one.is_gone]:
        _check_shared(found, gone)
        return LoadDecision(is_gone=True)
    unexpected = found.by_checkpoint(_common_bits([one.unclaimed for one in told]))
    problems = _merge_problems([one.problems for one in told])
    one_holds = "the checkpoint" if len(unexpected) == 1 else None
    if asked.strict:
        problems += [
            unexpected_problem(names, one_holds or one.path) for one, names in unexpected if names
        ]
    unmatched = unmatched_on_all(one.unmatched for one in told)
    if asked.strict:
        problems += unmatched
    elif unmatched:
        _log.warning("%s: %s", " and ".join(asked.paths), listed(unmatched, "; "))
    if problems:
        lines = listed(["", *problems], "\n  - ")
        paths = [one.path for one in found.checkpoints]
        do_not = f"{' and '.join(paths)} do{'es' * (len(paths) == 1)} not"
        raise IncompatibleError(f"{do_not} fit the state; nothing was changed:{lines}")
    between_hosts = asked.read_once == "job"
    shares, wants = common_bits([one.wants for one in told], between_hosts=between_hosts)
    return LoadDecision(
        unexpected=tuple(dict.fromkeys(name for _, names in unexpected for name in names)),
        makes_memory=any(one.makes_memory for one in told),
        places=any(one.places for one in told),
        loads_objects=any(one.loads_objects for one in told),
        shares=shares,
        wants=tuple(wants),
        from_memory=any(one.from_memory for one in told),
    )


def total_reports(told: Sequence[RankTotals]) -> JobTotals:
    """Return what reading came to over all ranks."""
    slowest, slowest_s = slowest_of([one.seconds for one in told])
    return JobTotals(
        nbytes_read=sum(one.nbytes_read for one in told),
        nbytes_placed=sum(one.nbytes_placed for one in told),
        slowest_rank=slowest,
        slowest_s=slowest_s,
    )


def bits_of(some: Sequence[str], names: Sequence[str]) -> bytes:
    """Return which of the names are among some, one bit each.

    Lists of names would grow with tensors times ranks.
    """
    chosen = set(some)
    bits = "".join("1" if name in chosen else "0" for name in names)
    return int(f"0{bits}", 2).to_bytes((len(names) + 7) // 8, "big")


def _check_shared(found: ResolvedSources, gone: Sequence[int]) -> None:
    """Raise StorageError if only some ranks see no more what all are to read."""
    there = [attempts.is_there(one.storage, one.path, one.attempt) for one in found.checkpoints]
    if all(there):
        folders = " or ".join(f"{one.path}/{one.attempt}" for one in found.checkpoints)
        raise StorageError(
            f"{folders} is not seen by {ranks_text(gone)}, though the coordinator sees it: "
            "the path is not on storage that all ranks share. Pass a path that is"
        )


def _can_share(told: Sequence[LoadRequest]) -> bool:
    """Say whether some of the ranks can hand on to each other what they read."""
    mode = told[0].read_once
    num_places = len({one.host for one in told}) if mode == "host" else 1
    return mode != "off" and num_places < len(told)


def _common_bits(ranks: Sequence[bytes]) -> int:
    """Return the bits of the names that `bits_of` has told of every rank."""
    common = -1
    for packed in ranks:
        common &= int.from_bytes(packed, "big")
    return common


def _merge_keys(ranks: Sequence[Sequence[tuple[str, Key]]]) -> dict[str, tuple[Key, ...]]:
    merged: dict[str, dict[Key, None]] = {}
    for keys in ranks:
        for fqn, key in keys:
            merged.setdefault(fqn, {})[key] = None
    return {fqn: tuple(keys) for fqn, keys in merged.items()}


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
