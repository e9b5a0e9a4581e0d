"""What a snapshot says of the save that it is a part of, for its writer and for a restore."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgpack

from dist_ckpt.comm.collective import Bodies
from dist_ckpt.format.catalog_json import MAX_WORLD_SIZE
from dist_ckpt.format.strict_json import Json
from dist_ckpt.planning.plan import ReplicaDigests

_NOT_OURS = "these are no details of a snapshot"


@dataclass(frozen=True, slots=True)
class Details:
    """What is the same on all ranks of a save, but for `replicas`.

    `mirrored` and `saved_by` go into the index. `began_at` is the coordinator's wall clock, or
    a little later than the save before: of two snapshots of a job the later is the newer. `bodies`
    are the inventories of all ranks, packed: the plan follows from them.
    """

    overwrite: bool
    mirrored: Mapping[str, Json]
    saved_by: Mapping[str, str]
    began_at: float
    bodies: Bodies
    replicas: ReplicaDigests


def encode_details(details: Details) -> bytes:
    """Return the details as `Snapshot.details`."""
    d = details
    body: bytes = msgpack.packb(
        (
            d.overwrite,
            dict(d.mirrored),
            dict(d.saved_by),
            d.began_at,
            [(body, list(_runs(ranks))) for body, ranks in d.bodies],
            d.replicas,
        )
    )
    return body


def decode_details(data: bytes) -> Details:
    """Return what `encode_details` was given. ValueError for anything else."""
    match msgpack.unpackb(data, use_list=False):
        case (
            bool(overwrite),
            dict(mirrored),
            dict(saved_by),
            float(began_at),
            tuple(bodies),
            tuple(replicas),
        ):
            unpacked = tuple(map(_body, bodies))
            return Details(overwrite, mirrored, saved_by, began_at, unpacked, replicas)
    raise ValueError(_NOT_OURS)


def _body(value: object) -> tuple[bytes, tuple[int, ...]]:
    match value:
        case (bytes(body), tuple(runs)):
            ranks: list[int] = []
            for run in runs:
                ranks += _ranks(run, MAX_WORLD_SIZE - len(ranks))
            return body, tuple(ranks)
    raise ValueError(_NOT_OURS)


def _ranks(run: object, most: int) -> range:
    """Return the ranks of a run. A short one can ask for many: at most so many."""
    match run:
        case (int(start), int(stop)) if 0 <= start < stop and stop - start <= most:
            return range(start, stop)
    raise ValueError(_NOT_OURS)


def _runs(ranks: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return ranks, in their order, as ranges: mostly all of them send one body."""
    runs: list[tuple[int, int]] = []
    for rank in ranks:
        if runs and runs[-1][1] == rank:
            runs[-1] = (runs[-1][0], rank + 1)
        else:
            runs.append((rank, rank + 1))
    return runs
