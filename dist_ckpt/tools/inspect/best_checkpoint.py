"""Which checkpoint of a run is the best by a metric: of all that are known, not of what is left."""

from __future__ import annotations

import time
from math import isnan

from dist_ckpt.core.commit.records.incarnations import read_history
from dist_ckpt.core.commit.records.protections import Where
from dist_ckpt.core.storage import Storage
from dist_ckpt.errors import NotFoundError
from dist_ckpt.runs.annotations import annotations_of
from dist_ckpt.runs.listing import Listing, RunCheckpoint


def best_measured(
    storage: Storage, listing: Listing, metric: str, *, is_max: bool
) -> RunCheckpoint | None:
    """Return the best checkpoint of a listing; None if nothing was measured.

    NotFoundError if what is known to be better is not there any more.
    """
    there = {one.where: one for one in listing.alive}
    measured = annotations_of(listing.annotations, time.time()).metrics
    values = {where: found[metric] for where, found in measured.items() if metric in found}
    history = read_history(storage, listing.root, with_old=bool(listing.old_folders))

    def counts(where: Where) -> bool:
        if where in there:
            return True
        replaced = any(found and found[0] == where[0] and found > where for found in there)
        return not (replaced or history.is_orphaned(*where))

    known = [where for where, value in values.items() if not isnan(value) and counts(where)]
    if not known:
        return None
    sign = -1 if is_max else 1
    best = min(known, key=lambda where: (sign * values[where], where not in there, where))
    if best not in there:
        kind = "max" if is_max else "min"
        raise NotFoundError(
            f"{listing.root}: the best {metric} is {values[best]:g}, of step {best[0]}, whose "
            f"checkpoint {best[1]} is gone or damaged. What is left of it is "
            f"@{kind}:{metric}; keep=dc.keep.best(1, {kind}={metric!r}) keeps the best"
        )
    return there[best]
