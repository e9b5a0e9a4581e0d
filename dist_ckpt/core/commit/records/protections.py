"""Protections of checkpoints against removal: pins, tags and leases. Each is an annotation.

    pin   {"pinned": true, "why": "..."}
    tag   {"release": true}         a tag belongs to the checkpoint of its newest annotation
    hold  {"<its id>": 3600}        a lease: seconds by the storage's clock; 0 once released
    mark  {"<its id>": "step-100"}  a deletion intent: the folder of that name will be removed

`protection_protocol.py` writes them in an order that is safe against a removal at the same time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from dist_ckpt.core.commit.records.record_store import StoredAnnotation
from dist_ckpt.core.format.filenames import Attempt
from dist_ckpt.core.format.strict_json import Scalar

PIN, TAG, LEASE, DELETION_INTENT = "pin", "tag", "hold", "mark"

# The annotation with the times of a save protects nothing: a removal may need its room.
SAVED = "saved"

# A deletion intent counts for this long. Its owner renames the checkpoint within half of this time,
# or gives up.
DELETION_INTENT_S = 3600.0

# The key of a checkpoint in annotations: its step, and its attempt.
CheckpointKey = tuple[int, Attempt]

# The value of each name in the annotations of one kind, and the annotation that it comes from.
_Newest = Mapping[tuple[CheckpointKey, str], tuple[Scalar, StoredAnnotation]]


@dataclass(frozen=True, slots=True)
class Protections:
    """The protections of each checkpoint: reasons of pins, names of tags, owners of leases.

    `unreadable` has the errors of annotations that are damaged, or of a newer dist_ckpt.
    """

    pins: Mapping[CheckpointKey, str]
    tags: Mapping[CheckpointKey, Sequence[str]]
    leases: Mapping[CheckpointKey, Sequence[str]]
    unreadable: Mapping[CheckpointKey, Sequence[str]]

    def of(self, key: CheckpointKey) -> tuple[str, ...]:
        """Return the protections of a checkpoint as texts; () if it may be removed."""
        why = self.pins.get(key)
        texts = [] if why is None else [f"pinned: {why}" if why else "pinned"]
        texts += [f"tag {name!r}" for name in self.tags.get(key, ())]
        texts += [f"leased by {owner}" for owner in self.leases.get(key, ())]
        texts += [f"an annotation cannot be read: {why}" for why in self.unreadable.get(key, ())]
        return tuple(texts)


def protections_of(annotations: Iterable[StoredAnnotation], now: float) -> Protections:
    """Return the protections that count at a time of the storage's clock. Pure."""
    annotations = tuple(annotations)
    pins = {
        key: _text(annotation.values.get("why"))
        for (key, name), (value, annotation) in newest_values(annotations, PIN).items()
        if name == "pinned" and _is_set(value)
    }
    tags: dict[CheckpointKey, list[str]] = defaultdict(list)
    for name, key in tagged(annotations).items():
        tags[key].append(name)
    leases: dict[CheckpointKey, list[str]] = defaultdict(list)
    for (key, _), (value, annotation) in newest_values(annotations, LEASE).items():
        # An invalid value protects forever.
        ttl_s = inf if isinstance(value, str | bool) else float(value or 0)
        if annotation.modified_at + ttl_s > now:
            leases[key].append(annotation.by)
    unreadable: dict[CheckpointKey, list[str]] = defaultdict(list)
    for annotation in annotations:
        if annotation.problem and annotation.name.kind in (PIN, TAG, LEASE):
            unreadable[annotation.step, annotation.attempt].append(annotation.problem)
    return Protections(pins, tags, leases, unreadable)


def newest_values(annotations: Iterable[StoredAnnotation], kind: str) -> _Newest:
    """Return the newest value of each name, for each checkpoint. Pure."""
    newest: dict[tuple[CheckpointKey, str], tuple[Scalar, StoredAnnotation]] = {}
    for annotation in _select_kind(annotations, kind):
        for name, value in annotation.values.items():
            newest[(annotation.step, annotation.attempt), name] = value, annotation
    return newest


def tagged(annotations: Iterable[StoredAnnotation]) -> dict[str, CheckpointKey]:
    """Return the checkpoint that has each tag of a root. Pure."""
    newest = newest_tagged(annotations)
    return {name: key for name, (key, value) in sorted(newest.items()) if _is_set(value)}


def newest_tagged(
    annotations: Iterable[StoredAnnotation],
) -> dict[str, tuple[CheckpointKey, Scalar]]:
    """Return the checkpoint and the value of each tag's newest annotation. Pure.

    The value is false if the tag was removed.
    """
    newest: dict[str, tuple[CheckpointKey, Scalar]] = {}
    for annotation in _select_kind(annotations, TAG):
        for name, value in annotation.values.items():
            newest[name] = (annotation.step, annotation.attempt), value
    return newest


def _select_kind(annotations: Iterable[StoredAnnotation], kind: str) -> list[StoredAnnotation]:
    """Return the annotations of a kind, the newest last."""
    chosen = [annotation for annotation in annotations if annotation.name.kind == kind]
    return sorted(chosen, key=lambda stored: (stored.is_old, stored.name.number, stored.name.id))


def deletion_intents_of(annotations: Iterable[StoredAnnotation], now: float) -> tuple[str, ...]:
    """Return the owners of deletion intents among the annotations of a checkpoint. Pure.

    An intent that cannot be read counts. An expired intent does not: its owner has died, or has
    given up.
    """
    return tuple(
        annotation.by or "another process"
        for annotation in annotations
        if annotation.name.kind == DELETION_INTENT
        and now - annotation.modified_at < DELETION_INTENT_S
    )


def _is_set(value: Scalar) -> bool:
    # An invalid value counts as true: a protection is never lost.
    return value is not None and value is not False


def _text(value: Scalar) -> str:
    return value if isinstance(value, str) else ""
