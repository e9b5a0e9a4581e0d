"""Name a checkpoint of a run by what it is: `runs/a@latest`, `runs/a@min:val/loss`, and so on.

    @latest       the highest step that a run may resume from
    @12000        that step
    @min:<name>   the lowest value of a metric, of two the older; nan is no value
    @max:<name>   the highest
    @tag:<name>   the one that has this tag

Orphaned checkpoints are selected by their step or a tag only.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from math import isnan

from dist_ckpt.core.commit.attempts import entries_at
from dist_ckpt.core.commit.records.leases import TTL_S, CheckpointRef, renewed_lease
from dist_ckpt.core.commit.records.record_store import can_lease
from dist_ckpt.core.format.filenames import is_selector, selections
from dist_ckpt.core.storage import Storage, open_storage, real_path
from dist_ckpt.errors import NotFoundError, StorageError, listed
from dist_ckpt.runs.listing import Listing, RunCheckpoint, list_run

_log = logging.getLogger("dist_ckpt")

# How often the selected checkpoint may be removed before it is leased.
_ROUNDS = 16

_KNOWN = "@latest, @<step>, @min:<metric>, @max:<metric> and @tag:<name>"


def resolve(path: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """Return the path of the checkpoint that `path` names by a selector, else `path` as it is.

    A path that exists is never taken for one with a selector. NotFoundError if there is no such
    checkpoint, ValueError for an unknown selector: both say what there is.
    """
    given = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(given, str) or "@" not in given:
        return path
    storage, text = open_storage(given)
    info = resolve_at(storage, text)
    return path if info is None else info.path


def open_resolved(path: str | os.PathLike[str]) -> tuple[Storage, str]:
    """Return the storage and the `real_path` of a checkpoint, to remove or protect it."""
    storage, folder = open_storage(resolve(path))
    return storage, real_path(folder)


def resolve_at(storage: Storage, path: str) -> RunCheckpoint | None:
    """Return the checkpoint that a storage's path names by a selector; None if it has none."""
    if "@" not in path or _exists(storage, path):
        return None
    if (chosen := next(selections(path), None)) is not None:
        root, selector = chosen
        return select(list_run(storage, root, now=time.time()), selector)
    root, _, selector = path.rpartition("@")
    if not _exists(storage, root):
        return None
    raise ValueError(f"{path}: {selector!r} is no selector: there are {_KNOWN}")


def select(listing: Listing, selector: str) -> RunCheckpoint:
    """Return the checkpoint of a run that a selector, without its @, chooses. Pure, but for a log.

    NotFoundError if there is none, ValueError for a bad selector. CorruptError if it is not known
    which checkpoints are orphaned, unless the selector is a step or a tag.
    """
    if not is_selector(selector):
        raise ValueError(f"{selector!r} is no selector: there are {_KNOWN}")
    kind, _, name = selector.partition(":")
    if kind == "latest":
        return _latest(listing)
    if kind in ("min", "max"):
        return _best(listing, name, min if kind == "min" else max)
    if kind == "tag":
        return _tagged(listing, name)
    return _of_step(listing, int(kind))


def _latest(listing: Listing) -> RunCheckpoint:
    if not listing.alive:
        states = [f"{info.name} is {_why_not(info)}" for info in listing.checkpoints]
        why = listed(states) if states else "it has no checkpoint"
        raise NotFoundError(f"{listing.root}: nothing here is the latest: {why}. Check the path")
    warn_of_unreadable(listing)
    return listing.alive[-1]


def warn_of_unreadable(listing: Listing) -> None:
    """Log the checkpoints that cannot be selected because they cannot be read."""
    for info in listing.checkpoints:
        if info.state in ("damaged", "incompatible"):
            _log.warning("%s is %s and is no candidate: %s", info.path, info.state, info.problem)


def _why_not(info: RunCheckpoint) -> str:
    if info.state != "committed":
        return info.state
    return "orphaned" if info.is_orphaned else "without a step"


def _best(listing: Listing, name: str, choose: Callable[..., float]) -> RunCheckpoint:
    there = measured(listing, name)
    value = choose(one.metrics[name] for one in there)
    return next(one for one in there if one.metrics[name] == value)


def measured(listing: Listing, name: str) -> list[RunCheckpoint]:
    """Return the checkpoints with a value of a metric that are not orphaned. NotFoundError."""
    there = [one for one in listing.alive if not isnan(one.metrics.get(name, float("nan")))]
    if not there:
        known = {metric for one in listing.alive for metric in one.metrics}
        raise NotFoundError(
            f"{listing.root}: no checkpoint has a value of the metric {name!r}; "
            f"{_there('metrics', sorted(known))}"
        )
    return there


def _tagged(listing: Listing, name: str) -> RunCheckpoint:
    for one in listing.checkpoints:
        if name in one.tags:
            return one
    known = sorted(tag for one in listing.checkpoints for tag in one.tags)
    raise NotFoundError(
        f"{listing.root}: no checkpoint has the tag {name!r}; {_there('tags', known)}"
    )


def _of_step(listing: Listing, step: int) -> RunCheckpoint:
    # The highest attempt first, and of these the ones that a run may resume from.
    there = [one for one in reversed(listing.checkpoints) if one.where and one.step == step]
    if not there:
        steps = sorted({one.where[0] for one in listing.checkpoints if one.where})
        raise NotFoundError(
            f"{listing.root}: no checkpoint of step {step}; {_there('steps', map(str, steps))}"
        )
    return max(there, key=lambda one: not one.is_orphaned)


def _there(kind: str, names: Iterable[str]) -> str:
    names = list(names)
    return f"the {kind} there are: {listed(names)}" if names else f"there are no {kind}"


# --- with a lease ----------------------------------------------------------------------------


def lease_selected(
    storage: Storage, choose: Callable[[], RunCheckpoint], ttl_s: float, stack: ExitStack
) -> RunCheckpoint:
    """Select a checkpoint, and lease it until the stack ends; select again if it is removed.

    Raises what `choose` does, ValueError for one without a step, NotFoundError if the selected
    checkpoint is removed again and again.
    """
    for num_left in reversed(range(_ROUNDS)):
        info = choose()
        try:
            stack.enter_context(renewed_lease(checkpoint_ref_of(storage, info), ttl_s))
            return info
        except NotFoundError:
            if not num_left:
                raise
    raise AssertionError


def resolve_with_lease(storage: Storage, path: str, stack: ExitStack) -> str:
    """Return what `resolve` does, leased until the stack ends if the root has records of a run.

    A root that cannot be written gets no lease. Without a selector there is no lease, and no call
    to the storage.
    """
    if (first := resolve_at(storage, path)) is None:
        return path
    root = first.path.rpartition("/")[0]
    if first.where is None or not can_lease(storage, root):
        return first.path
    try:
        return lease_selected(
            storage, lambda: resolve_at(storage, path) or first, TTL_S, stack
        ).path
    except StorageError as error:
        _log.debug("%s is not leased: %s", first.path, error)
        return first.path


def checkpoint_ref_of(storage: Storage, info: RunCheckpoint) -> CheckpointRef:
    """Return the reference by which annotations are written. ValueError without a step."""
    if info.where is None:
        raise ValueError(
            f"{info.path} is {info.state} and of step {info.step}: only committed checkpoints with "
            f"a step have annotations"
        )
    return CheckpointRef(storage, info.path.rpartition("/")[0] or "/", info.path, info.where)


def _exists(storage: Storage, path: str) -> bool:
    try:
        storage.list(path)
    except FileNotFoundError:
        return False
    except NotADirectoryError:
        folder, name = os.path.split(path)
        return name in {entry.name for entry in entries_at(storage, folder)}
    return True
