"""`dc.Run`: find, lease, measure, pin, tag and prune a run's checkpoints from any process."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from math import isnan
from typing import TYPE_CHECKING

from dist_ckpt.core.checkpoint.checkpoint import Checkpoint, open_at
from dist_ckpt.core.checkpoint.verify_checkpoint import verify
from dist_ckpt.core.commit.records import protection_protocol
from dist_ckpt.core.commit.records.incarnations import read_history
from dist_ckpt.core.commit.records.leases import LEASE_S
from dist_ckpt.core.commit.records.protection_protocol import CheckpointRef
from dist_ckpt.core.commit.records.protections import CheckpointKey
from dist_ckpt.core.runtime.public_names import refuse_old_attributes
from dist_ckpt.core.storage import open_storage
from dist_ckpt.errors import CheckpointError, NotFoundError
from dist_ckpt.message_text import listed
from dist_ckpt.runs.listing import Listing, RunCheckpoint, checkpoints, list_run
from dist_ckpt.runs.metrics import metrics_by_checkpoint, put_metrics
from dist_ckpt.runs.prune import Decision, find_metric_names, plan_prune, prune
from dist_ckpt.runs.retention_policy import RetentionPolicy
from dist_ckpt.runs.selectors import checkpoint_ref_of, lease_selected, select

_POLL_S = 2.0


class Run:
    """The checkpoints of a run in a folder, which need not exist yet. Needs no torch or ranks.

    It installs no handlers and keeps no file open: any process may use it, also while the run
    continues. Threads may share it. `which` is a step, or a selector: "@latest", "@12000",
    "@min:val/loss", "@max:accuracy", "@tag:release". A checkpoint that has no step, or is not
    committed, cannot be leased, pinned, tagged or measured.
    """

    if not TYPE_CHECKING:
        __getattr__ = refuse_old_attributes(
            "Run", {"hold": "lease", "wait_newer": "wait_for_newer"}
        )

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self._storage, self._root = open_storage(root)

    @property
    def root(self) -> str:
        """The run's folder."""
        return self._root

    @property
    def checkpoints(self) -> tuple[RunCheckpoint, ...]:
        """The result of `dist_ckpt.checkpoints` for the folder, read anew."""
        return checkpoints(self._root)

    def find(self, which: int | str) -> RunCheckpoint:
        """Return the checkpoint of a step or of a selector.

        NotFoundError if it does not exist, ValueError for a bad selector. Both list what exists.
        CorruptError if the index of that step is damaged.
        """
        if type(which) is int and which >= 0:
            return select(self._list(), str(which))
        if isinstance(which, str) and which.startswith("@"):
            return select(self._list(), which[1:])
        raise ValueError(f'{which!r}: give a step, or a selector such as "@latest"')

    def best(
        self,
        *,
        min: str | None = None,  # noqa: A002 - as of `dc.keep.best`
        max: str | None = None,  # noqa: A002
    ) -> RunCheckpoint | None:
        """Return the checkpoint with the best value of a metric; None if no value exists.

        Give `min` or `max`. The older of two equal ones is returned. Orphaned and replaced
        checkpoints do not count. Raises NotFoundError if the checkpoint with the best value is
        gone or damaged. (A pruner removes metrics with a checkpoint: use `keep.best` in its rules.)
        """
        if (min is None) == (max is None):
            raise ValueError('give min= or max=, the name of a metric: best(min="val/loss")')
        kind, metric, sign = ("min", min, 1) if min is not None else ("max", max or "", -1)
        listing = self._list()
        alive = {info.where: info for info in listing.usable}
        metrics = metrics_by_checkpoint(listing.annotations)
        values = {key: of[metric] for key, of in metrics.items() if metric in of}
        history = read_history(self._storage, listing.root, with_old=bool(listing.old_folders))

        def counts(key: CheckpointKey) -> bool:
            if key in alive:
                return True
            is_replaced = any(other and other[0] == key[0] and other > key for other in alive)
            return not (is_replaced or history.is_orphaned(*key))

        candidates = [key for key, value in values.items() if not isnan(value) and counts(key)]
        if not candidates:
            return None
        candidates.sort(key=lambda key: (sign * values[key], key not in alive, key))
        best = candidates[0]
        if best not in alive:
            raise NotFoundError(
                f"{listing.root}: the best {metric} is {values[best]:g}, of step {best[0]}, whose "
                f"checkpoint {best[1]} is gone or damaged. The best that exists is "
                f"@{kind}:{metric}; keep=dc.keep.best(1, {kind}={metric!r}) keeps the best"
            )
        return alive[best]

    def wait_for_newer(
        self, after: int | None = None, *, timeout_s: float = 3600.0, poll_s: float = _POLL_S
    ) -> int | None:
        """Wait for a checkpoint above the step `after`; return its step, or None after `timeout_s`.

        The checkpoint is committed, and neither orphaned nor known to be damaged, so the run may
        resume from it. The folder need not exist yet. The storage is read every `poll_s` seconds.
        A prune may remove the checkpoint before you open it: `lease_newer` also protects it.
        """
        for _ in _polls(timeout_s, poll_s):
            for info in self._newest_above(after):
                return info.step
        return None

    @contextmanager
    def lease_newer(
        self,
        after: int | None = None,
        *,
        timeout_s: float = 3600.0,
        poll_s: float = _POLL_S,
        ttl_s: float = LEASE_S,
    ) -> Iterator[Checkpoint | None]:
        """Wait for a checkpoint above the step `after`, and lease it inside the `with`.

        Return None after `timeout_s`, which may be `math.inf`. This is `wait_for_newer` and `lease`
        in one: if the checkpoint is removed before it is leased, a newer one is selected. The
        folder need not exist yet. StorageError if the folder cannot be written.
        """
        with ExitStack() as stack:
            yield self._lease_newer(after, stack, _polls(timeout_s, poll_s), ttl_s)

    def _lease_newer(
        self, after: int | None, stack: ExitStack, polls: Iterable[None], ttl_s: float
    ) -> Checkpoint | None:
        for _ in polls:
            with suppress(NotFoundError), ExitStack() as leases:  # it was removed just now
                for info in lease_selected(
                    self._storage, lambda: self._newest_above(after), leases, ttl_s=ttl_s
                ):
                    checkpoint = leases.enter_context(open_at(self._storage, info.path))
                    stack.push(leases.pop_all())
                    return checkpoint
        return None

    def _newest_above(self, after: int | None) -> Sequence[RunCheckpoint]:
        """Return the newest checkpoint that a run may resume from, if its step is above `after`."""
        try:
            newest = self._list().usable[-1:]
        except NotFoundError:  # the folder does not exist yet, or is removed
            return ()
        return [info for info in newest if after is None or (info.step or 0) > after]

    @contextmanager
    def lease(self, which: int | str, *, ttl_s: float = LEASE_S) -> Iterator[Checkpoint]:
        """Open a checkpoint inside a `with`, and protect it there from prune and delete.

        The lease is renewed meanwhile. After a crash or a stall of the process it expires after
        `ttl_s` seconds, by the storage's clock. NotFoundError if the checkpoint does not exist, or
        is about to be removed; StorageError if the folder cannot be written.
        """
        with ExitStack() as stack:
            (info,) = lease_selected(self._storage, lambda: [self.find(which)], stack, ttl_s=ttl_s)
            yield stack.enter_context(open_at(self._storage, info.path))

    def metrics(self, which: int | str, values: Mapping[str, float]) -> None:
        """Add metrics to a checkpoint, under any names; durable on return.

        The last value of a name counts. nan and infinities are allowed; nan is never the best.
        """
        ref = self._find_ref(which)
        put_metrics(self._storage, ref.root, ref.key, values)

    def pin(self, which: int | str, why: str | None = None) -> None:
        """Keep a checkpoint until it is unpinned, whatever the rules say; durable on return.

        Without `why`, a checkpoint that is pinned already keeps the reason of its pin.
        """
        reason = None if why is None else _text(why, "why")
        protection_protocol.pin(self._find_ref(which), reason)

    def unpin(self, which: int | str) -> None:
        """Remove the pin of a checkpoint. Do nothing if it has no pin."""
        protection_protocol.unpin(self._find_ref(which))

    def tag(self, which: int | str, name: str) -> None:
        """Give a tag to a checkpoint, which protects it; durable on return.

        A tag names one checkpoint of a run. A checkpoint that had the tag loses it.
        """
        protection_protocol.tag(self._find_ref(which), _text(name, "name", least=1))

    def untag(self, name: str) -> None:
        """Remove a tag from the checkpoint that has it. NotFoundError if none has."""
        protection_protocol.untag(self._find_ref(f"@tag:{_text(name, 'name', least=1)}"), name)

    def prune(
        self,
        keep: RetentionPolicy,
        *,
        among: Collection[RunCheckpoint] | None = None,
        damaged: bool = False,
        dry_run: bool = False,
    ) -> list[Decision]:
        """Remove the checkpoints that no rule and no protection keeps; return each with reasons.

        A checkpoint without reasons is removed, unless this is a `dry_run`. Never removed are
        pinned, tagged and leased checkpoints, the newest, the newest that passes a quick check, and
        the newest that was checked in full. Checkpoints with recorded damage do not count as the
        newest, and are removed only with `damaged`. `among` are checkpoints that an earlier dry run
        returned: then all others stay. NotFoundError if a rule names a metric that no checkpoint
        has.
        """
        if not isinstance(keep, RetentionPolicy):
            raise TypeError(f"keep={keep!r}: give a policy such as dc.keep.last(3)")
        among = None if among is None else tuple(among)
        for info in among or ():
            if not isinstance(info, RunCheckpoint):
                raise TypeError(f"among has {info!r}: give checkpoints that a dry run returned")
        listing = list_run(self._storage, self._root, now=time.time(), with_unreadable=True)
        known = {name for info in listing.checkpoints for name in info.metrics}
        unknown = sorted(find_metric_names(keep) - known)
        plan = plan_prune(listing, keep, damaged=damaged)
        if unknown and any(not reasons for _, reasons in plan):
            metrics = f"there are {listed(sorted(known))}" if known else "there are none"
            raise NotFoundError(
                f"{self._root}: no checkpoint has the metric {unknown[0]!r}, so nothing is "
                f"removed; {metrics}"
            )
        return prune(
            self._storage,
            self._root,
            keep,
            is_whole=is_complete,
            among=among,
            damaged=damaged,
            dry_run=dry_run,
        )

    def _list(self) -> Listing:
        return list_run(self._storage, self._root, now=time.time())

    def _find_ref(self, which: int | str) -> CheckpointRef:
        return checkpoint_ref_of(self._storage, self.find(which))

    def __repr__(self) -> str:
        return f"Run({self._root!r})"


def is_complete(info: RunCheckpoint) -> bool:
    """Return True if a checkpoint passes a quick check now."""
    try:
        return verify(info.path, level="quick", record=False).ok
    except CheckpointError:
        return False


def _polls(timeout_s: float, poll_s: float) -> Iterator[None]:
    """Yield immediately, then every `poll_s` seconds, and a last time after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    yield
    while (remaining_s := deadline - time.monotonic()) > 0:
        time.sleep(min(poll_s, remaining_s))
        yield


def _text(value: object, name: str, least: int = 0) -> str:
    if not isinstance(value, str) or len(value) < least:
        raise TypeError(f"{name}={value!r}: give a text")
    return value
