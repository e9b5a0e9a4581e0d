"""What a snapshot says of the save that it is a part of, for its writer and for a restore."""

from __future__ import annotations

from collections.abc import Mapping

from dist_ckpt.core.comm.collectives.collective import Bodies
from dist_ckpt.core.commit.records.incarnations import Incarnation
from dist_ckpt.core.format.strict_json import Scalar
from dist_ckpt.core.planning.plan import ReplicaDigests
from dist_ckpt.core.runtime.typed_msgpack import Message


class SnapshotMetadata(Message, frozen=True):
    """What is the same on all ranks of a save, but for `replicas`.

    `mirrored` and `saved_by` go into the index. `began_at` is the coordinator's wall clock, or
    a little later than the save before: of two snapshots of a job the later is the newer. `bodies`
    are the inventories of all ranks, packed: the plan follows from them. `run` is the start of a
    run that saves, if one does: an attempt's number tells it, but a snapshot may be of none yet.
    """

    overwrite: bool
    mirrored: Mapping[str, Scalar]
    saved_by: Mapping[str, str]
    began_at: float
    bodies: Bodies
    replicas: ReplicaDigests
    run: Incarnation | None = None
