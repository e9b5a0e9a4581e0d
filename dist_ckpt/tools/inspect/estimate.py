"""What checkpoints will cost: size, time and space, before a job is started."""

from __future__ import annotations

import os
import secrets
import time
from contextlib import suppress
from dataclasses import dataclass
from math import inf

from dist_ckpt.core.checkpoint.open_checkpoint import OpenCheckpoint
from dist_ckpt.core.format.filenames import Attempt
from dist_ckpt.core.planning.save.save_planner import stored_nbytes
from dist_ckpt.core.planning.sharded_views import plan_stored
from dist_ckpt.core.storage import open_storage
from dist_ckpt.errors import StorageError
from dist_ckpt.openers import OPENER
from dist_ckpt.runs.retention_policy import Candidate, RetentionPolicy, parse_rules
from dist_ckpt.tools.rewrite.reshard import even

# Saves of a job that are gone through one by one.
MAX_SAVES = 5000
# What a write test writes: enough to be beyond what a storage answers from memory at once.
TEST_NBYTES = 256 << 20
_TEST_PART = 8 << 20


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a run's checkpoints will cost, in bytes and seconds; what cannot be said is None.

    `nbytes` is of one checkpoint, of which the fullest of `world_size` ranks writes `nbytes_rank`.
    `num_saves` are made, of which `num_kept` stay at the end; at most `num_at_once` lie there at a
    time, with the one being written, which is `nbytes_peak`. `save_s` is how long a save takes at
    `rate`, in bytes a second of all ranks together. `nbytes_free` is free at `folder` now.
    """

    path: str
    world_size: int
    nbytes: int
    nbytes_rank: int
    num_files: int
    num_saves: int
    num_kept: int
    num_at_once: int
    rate: float | None
    folder: str
    nbytes_free: int

    @property
    def nbytes_peak(self) -> int:
        """The most that lies in the folder at a time."""
        return self.num_at_once * self.nbytes

    @property
    def save_s(self) -> float | None:
        """How long one save takes to write."""
        return None if self.rate is None else self.nbytes / self.rate

    @property
    def fits(self) -> bool:
        """Say whether the folder has the space now."""
        return self.nbytes_peak <= self.nbytes_free


def estimate(  # noqa: PLR0913 - what a job is
    path: str | os.PathLike[str],
    *,
    world_size: int | None = None,
    steps: int | None = None,
    save_every: int | None = None,
    step_s: float | None = None,
    keep: RetentionPolicy | None = None,
    rate: float | None = None,
    folder: str | os.PathLike[str] | None = None,
) -> Estimate:
    """Return what checkpoints like that at `path` will cost a job on `world_size` ranks.

    It is planned as a save is, every tensor cut evenly over the ranks, so it writes what a sharded
    job would; default are the ranks that saved it. The job saves every `save_every` of `steps`
    steps, and prunes by `keep`, without which all stay; default is one save. Rules that ask for
    time need `step_s`, the seconds of a step. Metrics are taken to be as costly as can be: the best
    are the oldest. `rate` is in bytes a second. `folder` is where they will lie, default that of
    the checkpoint. Nothing is written. Raises ValueError for what makes no sense, otherwise as
    `dc.open`.
    """
    num_saves = _checked(steps, save_every, step_s, rate)
    if keep is not None and not isinstance(keep, RetentionPolicy):
        raise TypeError(f"keep={keep!r}: give a policy such as dc.keep.last(3)")
    opened = OpenCheckpoint.open(path, opener=OPENER)
    where, index, main = opened.path, opened.index, opened.merged_objects()
    world_size = index.catalog.world_size if world_size is None else world_size
    plan = plan_stored(index.catalog, even(world_size), main.tree, main.numpy)
    files = stored_nbytes(plan.catalog)
    ranks = [0] * world_size
    for (_, rank), nbytes in files.items():
        ranks[rank] += nbytes
    others = sum(one.nbytes for table in (index.objects, index.attached) for one in table)
    interval = (save_every or 1, None if step_s is None else (save_every or 1) * step_s)
    kept, at_once = _kept(num_saves, interval, keep)
    target = where if folder is None else open_storage(folder)[1]
    return Estimate(
        path=where,
        world_size=world_size,
        nbytes=sum(ranks) + others,
        nbytes_rank=max(ranks),
        num_files=len(files) + len(index.objects) + len(index.attached),
        num_saves=num_saves,
        num_kept=kept,
        num_at_once=at_once,
        rate=rate,
        folder=target,
        nbytes_free=free_nbytes(target),
    )


def _checked(
    steps: int | None, save_every: int | None, step_s: float | None, rate: float | None
) -> int:
    """Return how many saves a job makes. ValueError for what makes no sense."""
    if (steps is None) != (save_every is None):
        raise ValueError("steps and save_every go together: give both (--steps, --save-every)")
    for name, given in (("steps", steps), ("save_every", save_every)):
        if given is not None and (type(given) is not int or given < 1):
            raise ValueError(f"{name}={given!r}: give a number from 1 on")
    for name, number in (("step_s", step_s), ("rate", rate)):
        if number is None:
            continue
        if isinstance(number, bool | str) or not 0 < number < inf:
            raise ValueError(f"{name}={number!r}: give a number above 0")
    num_saves = 1 if steps is None or save_every is None else steps // save_every
    if not 1 <= num_saves <= MAX_SAVES:
        raise ValueError(
            f"{steps} steps with a save every {save_every} are {num_saves} saves: give 1 to "
            f"{MAX_SAVES}, such as those of a part of the job"
        )
    return num_saves


def _kept(
    num_saves: int, interval: tuple[int, float | None], keep: RetentionPolicy | None
) -> tuple[int, int]:
    """Return how many checkpoints stay, and how many there are at once at most. Pure."""
    if keep is None:
        return num_saves, num_saves
    rules = parse_rules(str(keep))
    is_of_time = any({"days", "hours"} & named.keys() for _, _, named in rules)
    if is_of_time and interval[1] is None:
        raise ValueError(f"{keep} asks for time: say how long a step takes, step_s (--step-s)")
    metrics = {
        str(named[way]): sign
        for _, _, named in rules
        for way, sign in (("min", 1.0), ("max", -1.0))
        if way in named
    }
    there: list[Candidate] = []
    most = 0
    for number in range(1, num_saves + 1):
        there.append(_candidate(number, interval, metrics))
        most = max(most, len(there))
        reasons = keep.reasons(there)
        there = [one for one, told in zip(there, reasons, strict=True) if told or one is there[-1]]
    return len(there), most


def _candidate(
    number: int, interval: tuple[int, float | None], metrics: dict[str, float]
) -> Candidate:
    """Return a save of the job; what is measured of it is worse than of all before."""
    return Candidate(
        step=number * interval[0],
        attempt=Attempt(1, "0" * 16),
        saved_at=number * (interval[1] or 0.0),
        metrics={name: sign * number for name, sign in metrics.items()},
    )


def free_nbytes(folder: str) -> int:
    """Return what this user may still write where a folder is, or will be. StorageError."""
    try:
        there = folder
        while not os.path.isdir(there) and there != "/":
            there = os.path.dirname(there)
        found = os.statvfs(there)
    except OSError as error:
        raise StorageError(f"{folder}: its free space is not known: {error.strerror}") from error
    return found.f_bavail * found.f_frsize


def measured_rate(folder: str | os.PathLike[str]) -> float:
    """Write 256 MB into a folder, make them durable, remove them; return the bytes a second.

    Raises StorageError if they cannot be written there, as without space.
    """
    storage, where = open_storage(folder)
    name = f"{where}/.dist-ckpt-write-test-{secrets.token_hex(8)}.tmp"
    part = secrets.token_bytes(_TEST_PART)
    try:
        began = time.monotonic()
        file = storage.create(name, TEST_NBYTES)
        try:
            for start in range(0, TEST_NBYTES, _TEST_PART):
                file.write_at(start, part)
            file.finish()
        except BaseException:
            file.discard()
            raise
        seconds = time.monotonic() - began
    except FileNotFoundError as error:
        raise StorageError(f"{where} is no folder: make it, or give another") from error
    finally:
        with suppress(FileNotFoundError, NotADirectoryError):
            storage.remove(name)
    return TEST_NBYTES / max(seconds, 1e-6)
