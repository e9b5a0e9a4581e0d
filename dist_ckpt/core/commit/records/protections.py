"""What keeps a checkpoint from being removed: pins, tags and holds, each a fact about it.

    pin   {"pinned": true, "why": "..."}
    tag   {"release": true}         of all facts of a root, the newest says where a tag is
    hold  {"<its id>": 3600}        for so many seconds of the storage's clock; 0 once released
    mark  {"<its id>": "step-100"}  somebody is about to remove it, the folder of that name

How they are put, and how that is kept apart from a removal, is in `leases.py`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from dist_ckpt.core.commit.records.record_store import StoredAnnotation
from dist_ckpt.core.format.filenames import Attempt
from dist_ckpt.core.format.strict_json import Scalar

PIN, TAG, HOLD, MARK = "pin", "tag", "hold", "mark"

# So long a mark counts. Who put it renames within half of that, or not at all.
DELETION_INTENT_S = 3600.0

# A checkpoint that facts are about: its step, and its attempt.
Where = tuple[int, Attempt]

# What a fact of a kind says, and the fact that says so.
_Newest = Mapping[tuple[Where, str], tuple[Scalar, StoredAnnotation]]


@dataclass(frozen=True, slots=True)
class Protections:
    """What keeps which checkpoints: why they are pinned, their tags, and who holds them.

    `unreadable` are those with a pin, tag or hold that is damaged, or of a newer version.
    """

    pins: Mapping[Where, str]
    tags: Mapping[Where, Sequence[str]]
    holds: Mapping[Where, Sequence[str]]
    unreadable: Mapping[Where, Sequence[str]]

    def of(self, where: Where) -> tuple[str, ...]:
        """Return all that keeps a checkpoint, in words; nothing if it may be removed."""
        pinned = self.pins.get(where)
        told = [] if pinned is None else [f"pinned: {pinned}" if pinned else "pinned"]
        told += [f"tag {name!r}" for name in self.tags.get(where, ())]
        told += [f"held by {who}" for who in self.holds.get(where, ())]
        told += [f"a fact cannot be read: {why}" for why in self.unreadable.get(where, ())]
        return tuple(told)


def protections_of(facts: Iterable[StoredAnnotation], now: float) -> Protections:
    """Return what keeps which checkpoints at a time of the storage's clock. Pure."""
    facts = tuple(facts)
    pins = {
        where: _text(fact.values.get("why"))
        for (where, name), (value, fact) in newest_values(facts, PIN).items()
        if name == "pinned" and _is_set(value)
    }
    tags: dict[Where, list[str]] = defaultdict(list)
    for name, where in tagged(facts).items():
        tags[where].append(name)
    holds: dict[Where, list[str]] = defaultdict(list)
    for (where, _), (value, fact) in newest_values(facts, HOLD).items():
        if fact.modified_at + _life_s(value) > now:
            holds[where].append(fact.by)
    unreadable: dict[Where, list[str]] = defaultdict(list)
    for fact in facts:
        if fact.problem and fact.name.kind in (PIN, TAG, HOLD):
            unreadable[fact.step, fact.attempt].append(fact.problem)
    return Protections(pins, tags, holds, unreadable)


def newest_values(facts: Iterable[StoredAnnotation], kind: str) -> _Newest:
    """Return the value of each name of each checkpoint; that of the newest fact counts. Pure."""
    found: dict[tuple[Where, str], tuple[Scalar, StoredAnnotation]] = {}
    for fact in _of_kind(facts, kind):
        for name, value in fact.values.items():
            found[(fact.step, fact.attempt), name] = value, fact
    return found


def tagged(facts: Iterable[StoredAnnotation]) -> dict[str, Where]:
    """Return where each tag of a root is: where the newest fact about it puts it. Pure."""
    newest = newest_tagged(facts)
    return {name: where for name, (where, value) in sorted(newest.items()) if _is_set(value)}


def newest_tagged(facts: Iterable[StoredAnnotation]) -> dict[str, tuple[Where, Scalar]]:
    """Return what the newest fact about each tag of a root says, also that nobody has it. Pure."""
    found: dict[str, tuple[Where, Scalar]] = {}
    for fact in _of_kind(facts, TAG):
        for name, value in fact.values.items():
            found[name] = (fact.step, fact.attempt), value
    return found


def _of_kind(facts: Iterable[StoredAnnotation], kind: str) -> list[StoredAnnotation]:
    """Return the facts of a kind, the newest last."""
    own = [fact for fact in facts if fact.name.kind == kind]
    return sorted(own, key=lambda fact: (fact.name.number, fact.name.id))


def deletion_intents_of(facts: Iterable[StoredAnnotation], now: float) -> tuple[str, ...]:
    """Return who is about to remove the checkpoint that the facts are about. Pure.

    A mark that cannot be read counts. One that is old does not: who put it has died, or will not
    remove anything any more.
    """
    return tuple(
        fact.by or "somebody"
        for fact in facts
        if fact.name.kind == MARK and now - fact.modified_at < DELETION_INTENT_S
    )


def _is_set(value: Scalar) -> bool:
    # What is neither yes nor no protects: who put it meant something by it.
    return value is not None and value is not False


def _text(value: Scalar) -> str:
    return value if isinstance(value, str) else ""


def _life_s(value: Scalar) -> float:
    """Return for how many seconds a hold keeps; without end if that cannot be understood."""
    if value is None:
        return 0.0
    if isinstance(value, str | bool):
        return inf
    return float(value)
