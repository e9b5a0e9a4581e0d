"""Name a checkpoint of a run by a property: `runs/a@latest`, `runs/a@min:val/loss`, and so on.

    @latest       the highest step that a run may resume from
    @12000        that step
    @min:<name>   the lowest value of a metric, the older of equal ones; nan does not count
    @max:<name>   the highest
    @tag:<name>   the checkpoint with this tag

Checkpoints that are orphaned or damaged are selected by their step or a tag only.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from math import isnan

from dist_ckpt.core.commit.attempts import NOTHING_YET, list_entries
from dist_ckpt.core.commit.records.leases import LEASE_S, renewed_lease
from dist_ckpt.core.commit.records.protection_protocol import CheckpointRef
from dist_ckpt.core.commit.records.record_store import can_lease
from dist_ckpt.core.format.filenames import is_selector, selections
from dist_ckpt.core.storage import Storage, entry_path, open_storage
from dist_ckpt.errors import (
    CheckpointError,
    CorruptError,
    IncompatibleError,
    NotFoundError,
    StorageError,
)
from dist_ckpt.message_text import listed, states_text
from dist_ckpt.runs.listing import Listing, RunCheckpoint, list_run

_log = logging.getLogger("dist_ckpt")

# The number of tries to lease selected checkpoints, which another process may remove first.
_MAX_TRIES = 16

_SELECTORS = "@latest, @<step>, @min:<metric>, @max:<metric> and @tag:<name>"


def resolve(path: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """Return the path of the checkpoint that `path` names by a selector, else `path` as it is.

    The path of an existing file or folder has no selector. NotFoundError if the checkpoint does not
    exist, ValueError for an unknown selector. Both list what exists.
    """
    string = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(string, str) or "@" not in string:
        return path
    storage, text = open_storage(string)
    info = resolve_at(storage, text)
    return path if info is None else info.path


def open_resolved(path: str | os.PathLike[str]) -> tuple[Storage, str]:
    """Return the storage and the `entry_path` of a checkpoint, to remove or protect it."""
    storage, folder = open_storage(resolve(path))
    return storage, entry_path(folder)


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
    raise ValueError(f"{path}: {selector!r} is not a selector: there are {_SELECTORS}")


def select(listing: Listing, selector: str) -> RunCheckpoint:
    """Return the checkpoint that a selector names; give the selector without its @.

    Raises NotFoundError if no checkpoint matches, and ValueError for a bad selector. Raises
    CorruptError if the history cannot be read, unless the selector is a step or a tag. Raises
    CorruptError or IncompatibleError for a step whose index cannot be read.
    """
    if not is_selector(selector):
        raise ValueError(f"{selector!r} is not a selector: there are {_SELECTORS}")
    kind, _, name = selector.partition(":")
    if kind == "latest":
        return _select_latest(listing)
    if kind in ("min", "max"):
        sign = 1 if kind == "min" else -1
        warn_of_unreadable(listing)
        return min(measured(listing, name), key=lambda info: sign * info.metrics[name])
    if kind == "tag":
        tagged = next((info for info in listing.checkpoints if name in info.tags), None)
        if tagged is not None:
            return tagged
        tags = sorted(tag for info in listing.checkpoints for tag in info.tags)
        raise _nothing_yet_error(listing) or NotFoundError(
            f"{listing.root}: no checkpoint has the tag {name!r}; {_list_text('tags', tags)}"
            f"{_unreadable_text(listing)}"
        )
    return _select_step(listing, int(kind))


def _select_latest(listing: Listing) -> RunCheckpoint:
    if not listing.usable:
        raise _nothing_yet_error(listing) or NotFoundError(
            f"{listing.root}: no latest checkpoint: check the path, or select another checkpoint "
            f"by its step or tag: {_states_of(listing)}"
        )
    warn_of_unreadable(listing)
    return listing.usable[-1]


def _nothing_yet_error(listing: Listing) -> NotFoundError | None:
    """Return the error of a run whose first save is not committed yet; None if it has others."""
    if any(info.state not in ("open", "abandoned") for info in listing.checkpoints):
        return None
    remedy = NOTHING_YET.format(listing.root) + (
        "" if listing.newest_incarnation else "; or check the path, as no run is here"
    )
    states = f": {_states_of(listing)}" if listing.checkpoints else ""
    return NotFoundError(f"{listing.root}: no checkpoint is saved yet. {remedy}{states}")


def _states_of(listing: Listing) -> str:
    return states_text([f"{i.name} is {describe_exclusion(i)}" for i in listing.checkpoints])


def warn_of_unreadable(listing: Listing) -> None:
    """Log the checkpoints that are not selected because they are damaged or cannot be read."""
    for info in listing.checkpoints:
        if info.state in ("damaged", "incompatible"):
            _log.warning("%s is %s and is ignored: %s", info.path, info.state, info.problem)
        elif info.damage is not None and not info.is_orphaned:
            _log.warning("%s is damaged and is ignored: %s", info.path, info.damage)


def describe_exclusion(info: RunCheckpoint) -> str:
    """Return why a checkpoint is not the newest that a run resumes from."""
    if info.state != "committed":
        return info.state
    if info.damage is not None:
        return "damaged"
    if info.step is None:
        return "without a step"
    return "orphaned" if info.is_orphaned else "not selected"


def measured(listing: Listing, name: str) -> list[RunCheckpoint]:
    """Return the checkpoints with a metric, neither orphaned nor damaged. NotFoundError if none."""
    checkpoints = [
        info for info in listing.usable if not isnan(info.metrics.get(name, float("nan")))
    ]
    if not checkpoints:
        names = {metric for info in listing.usable for metric in info.metrics}
        raise _nothing_yet_error(listing) or NotFoundError(
            f"{listing.root}: no checkpoint has a value of the metric {name!r}; "
            f"{_list_text('metrics', sorted(names))}{_unreadable_text(listing)}"
        )
    return checkpoints


def _select_step(listing: Listing, step: int) -> RunCheckpoint:
    # The highest attempt first. One that is not orphaned is preferred.
    checkpoints = [info for info in reversed(listing.checkpoints) if info.where]
    attempts_of_step = [info for info in checkpoints if info.step == step]
    if not attempts_of_step:
        for info in listing.checkpoints:
            if _step_in_name(info.name) == step and info.state != "committed":
                raise _unreadable_error(listing, info)
        steps = sorted({info.where[0] for info in checkpoints if info.where})
        raise _nothing_yet_error(listing) or NotFoundError(
            f"{listing.root}: no checkpoint of step {step}; {_list_text('steps', map(str, steps))}"
            f"{_unreadable_text(listing)}"
        )
    return max(attempts_of_step, key=lambda info: not info.is_orphaned)


def _step_in_name(name: str) -> int | None:
    """Return the number at the end of a folder's name, which `dc.save` lets users choose."""
    digits = re.search(r"[0-9]+$", name)
    return int(digits[0]) if digits else None


def _unreadable_error(listing: Listing, info: RunCheckpoint) -> CheckpointError:
    """Return the error of a checkpoint, selected by the step in its name, that is not committed."""
    text = f"{info.path} is {info.state}: {info.problem}"
    usable = () if listing.history_problem else listing.usable
    good = f". The newest good checkpoint is {usable[-1].path}" if usable else ""
    kinds: dict[str, type[CheckpointError]] = {
        "damaged": CorruptError,
        "incompatible": IncompatibleError,
    }
    return kinds.get(info.state, NotFoundError)(f"{text}{good}")


def _unreadable_text(listing: Listing) -> str:
    """Return a note about checkpoints whose step, metrics and tags cannot be read."""
    infos = (info for info in listing.checkpoints if info.state in ("damaged", "incompatible"))
    states = [f"{info.name} is {info.state}" for info in infos]
    return f"; not readable: {states_text(states)}" if states else ""


def _list_text(kind: str, names: Iterable[str]) -> str:
    names = list(names)
    return f"the {kind} there are: {listed(names)}" if names else f"there are no {kind}"


def lease_selected(
    storage: Storage,
    choose: Callable[[], Sequence[RunCheckpoint]],
    stack: ExitStack,
    *,
    ttl_s: float = LEASE_S,
) -> Sequence[RunCheckpoint]:
    """Select checkpoints, and lease them until the stack ends. Select again if one is removed.

    Raises the errors of `choose`, and ValueError for a checkpoint without a step. Raises
    NotFoundError if each time a selected checkpoint is removed before the lease.
    """
    for num_left in reversed(range(_MAX_TRIES)):
        selected = choose()
        try:
            with ExitStack() as leases:
                for info in selected:
                    ref = checkpoint_ref_of(storage, info)
                    leases.enter_context(renewed_lease(ref, ttl_s))
                stack.push(leases.pop_all())
            return selected
        except NotFoundError:
            if not num_left:
                raise
    raise AssertionError


def resolve_with_lease(storage: Storage, path: str, stack: ExitStack | None) -> str:
    """Resolve a path like `resolve`, and lease the checkpoint until the stack ends.

    The checkpoint is not leased without a `stack`, or if its root has no records of a run, or
    cannot be written. A path without a selector is returned as it is, without a lease or a call of
    the storage.
    """
    if (first := resolve_at(storage, path)) is None:
        return path
    root = first.path.rpartition("/")[0]
    if stack is None or first.where is None or not can_lease(storage, root):
        return first.path
    try:
        (info,) = lease_selected(storage, lambda: [resolve_at(storage, path) or first], stack)
        return info.path
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
        return name in {entry.name for entry in list_entries(storage, folder)}
    return True
