"""`dc.estimate`: the size, time and space of the checkpoints of a future job."""

from __future__ import annotations

import os
import secrets
import time
from contextlib import suppress
from dataclasses import dataclass

from dist_ckpt.core.checkpoint.open_checkpoint import OpenCheckpoint
from dist_ckpt.core.format.filenames import Attempt
from dist_ckpt.core.planning.save.save_planner import stored_nbytes
from dist_ckpt.core.planning.sharding_config import plan_reshard
from dist_ckpt.core.runtime.arguments import LEAST_POSITIVE, check_number, check_whole
from dist_ckpt.core.storage import open_storage
from dist_ckpt.core.storage.storage_wrappers import free_nbytes
from dist_ckpt.default_opener import OPENER
from dist_ckpt.errors import StorageError
from dist_ckpt.runs.policy_text import parse_rules
from dist_ckpt.runs.retention_policy import Candidate, RetentionPolicy
from dist_ckpt.tools.rewrite.reshard import even_sharding

# At most this many saves are simulated, one by one.
MAX_SAVES = 5000
# The size of a write test. It is larger than the write cache of a storage.
TEST_NBYTES = 256 << 20
_TEST_PART = 8 << 20


@dataclass(frozen=True, slots=True)
class Estimate:
    """The cost of a run's checkpoints in bytes and seconds. Unknown fields are None.

    `nbytes` is the size of one checkpoint, and `nbytes_rank` the largest share of one of its
    `world_size` ranks. The run makes `num_saves` checkpoints, and `num_kept` of them remain at the
    end. At most `num_at_once` checkpoints exist at a time, including the one being written. They
    take `nbytes_peak`. A save takes `save_s` at `rate`, the bytes per second of all ranks together.
    `nbytes_free` is the free space at `folder` now.
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
        """The most bytes of checkpoints at a time."""
        return self.num_at_once * self.nbytes

    @property
    def save_s(self) -> float | None:
        """The seconds of one save."""
        return None if self.rate is None else self.nbytes / self.rate

    @property
    def fits(self) -> bool:
        """True if the folder has enough space now."""
        return self.nbytes_peak <= self.nbytes_free


def estimate(  # noqa: PLR0913 - the parameters of a job
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
    """Estimate the cost of checkpoints like the one at `path` for a job on `world_size` ranks.

    The estimate splits every tensor evenly over the ranks. By default `world_size` is that of the
    checkpoint. The job has `steps` steps and saves every `save_every` steps, by default once. It
    prunes by `keep`. Without `keep` all checkpoints remain. Rules with a time need `step_s`, the
    seconds of a step. For metrics the worst case is assumed: the best checkpoints are the oldest.
    `rate` is in bytes per second. `folder` is the target, by default the folder of the checkpoint.
    Nothing is written. Raises ValueError for bad arguments, and the errors of `dc.open`.
    """
    num_saves = _count_saves(steps, save_every, step_s, rate)
    if keep is not None and not isinstance(keep, RetentionPolicy):
        raise TypeError(f"keep={keep!r}: give a policy such as dc.keep.last(3)")
    opened = OpenCheckpoint.open(path, opener=OPENER)
    index, main = opened.index, opened.merged_objects()
    world_size = index.catalog.world_size if world_size is None else world_size
    plan = plan_reshard(index.catalog, even_sharding(world_size), main.tree, main.numpy)
    files = stored_nbytes(plan.catalog)
    ranks = [0] * world_size
    for (_, rank), nbytes in files.items():
        ranks[rank] += nbytes
    documents = sum(file.nbytes for table in (index.objects, index.attached) for file in table)
    interval = (save_every or 1, None if step_s is None else (save_every or 1) * step_s)
    num_kept, num_at_once = _simulate(num_saves, interval, keep)
    storage, target = open_storage(opened.path if folder is None else folder)
    if (nbytes_free := free_nbytes(storage, target)) is None:
        raise StorageError(f"{target}: its free space is unknown: give a folder on another disk")
    return Estimate(
        path=opened.path,
        world_size=world_size,
        nbytes=sum(ranks) + documents,
        nbytes_rank=max(ranks),
        num_files=len(files) + len(index.objects) + len(index.attached),
        num_saves=num_saves,
        num_kept=num_kept,
        num_at_once=num_at_once,
        rate=rate,
        folder=target,
        nbytes_free=nbytes_free,
    )


def _count_saves(
    steps: int | None, save_every: int | None, step_s: float | None, rate: float | None
) -> int:
    """Return the number of saves of a job. ValueError for bad arguments."""
    if (steps is None) != (save_every is None):
        raise ValueError("steps and save_every go together: give both (--steps, --save-every)")
    for name, value in (("steps", steps), ("save_every", save_every)):
        if value is not None:
            check_whole(name, value, 1)
    for name, number in (("step_s", step_s), ("rate", rate)):
        if number is not None:
            check_number(name, number, "a number above 0", LEAST_POSITIVE)
    num_saves = 1 if steps is None or save_every is None else steps // save_every
    if not 1 <= num_saves <= MAX_SAVES:
        raise ValueError(
            f"{steps} steps with a save every {save_every} make {num_saves} saves: give steps "
            f"and save_every for 1 to {MAX_SAVES} saves"
        )
    return num_saves


def _simulate(
    num_saves: int, interval: tuple[int, float | None], keep: RetentionPolicy | None
) -> tuple[int, int]:
    """Return the number of checkpoints at the end, and the most at the same time. Pure."""
    if keep is None:
        return num_saves, num_saves
    rules = parse_rules(str(keep))
    is_of_time = any({"days", "hours"} & named.keys() for _, _, named in rules)
    if is_of_time and interval[1] is None:
        raise ValueError(f"{keep} needs the time of a step: give step_s (--step-s)")
    metrics = {
        str(named[way]): sign
        for _, _, named in rules
        for way, sign in (("min", 1.0), ("max", -1.0))
        if way in named
    }
    saves: list[Candidate] = []
    most = 0
    for number in range(1, num_saves + 1):
        newest = Candidate(
            step=number * interval[0],
            attempt=Attempt(1, "0" * 16),
            saved_at=number * (interval[1] or 0.0),
            # Worse than those of all earlier saves.
            metrics={name: sign * number for name, sign in metrics.items()},
        )
        saves.append(newest)
        most = max(most, len(saves))
        reasons = keep.reasons(saves)
        saves = [s for s, texts in zip(saves, reasons, strict=True) if texts or s is newest]
    return len(saves), most


def measure_rate(folder: str | os.PathLike[str]) -> float:
    """Write 256 MiB into a folder durably, remove them, and return the bytes per second.

    Raises StorageError if the folder does not exist, or if the write fails.
    """
    storage, path = open_storage(folder)
    name = f"{path}/.dist-ckpt-write-test-{secrets.token_hex(8)}.tmp"
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
        raise StorageError(f"{path} is not a folder: create it, or give another folder") from error
    finally:
        with suppress(FileNotFoundError, NotADirectoryError):
            storage.remove(name)
    return TEST_NBYTES / max(seconds, 1e-6)
