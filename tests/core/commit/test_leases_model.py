"""Lease against prune: the order of steps, in every interleaving, with deaths and clocks.

First the protocol by itself, with two holders and two removers, of which any may die and be
replaced, and with deletion intents and leases that expire. Then the real code, one storage call at
a time. Each planted mistake is found.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest

from commit_cases import PATH, save
from dist_ckpt.core.commit import attempts, removal
from dist_ckpt.core.commit.attempts import list_attempts
from dist_ckpt.core.commit.records import protection_protocol, record_store
from dist_ckpt.core.commit.records.leases import Lease
from dist_ckpt.core.commit.records.protection_protocol import (
    CheckpointRef,
    remove_annotations,
    remove_if_unprotected,
)
from dist_ckpt.core.commit.records.record_store import StoredAnnotation, read_annotations
from dist_ckpt.core.format.filenames import AnnotationName, Attempt
from dist_ckpt.core.format.run_records import Annotation, decode_record
from dist_ckpt.core.format.strict_json import Scalar
from dist_ckpt.core.runtime.processes import paused_collector
from dist_ckpt.core.storage import Storage
from dist_ckpt.errors import CheckpointError, NotFoundError
from dist_ckpt.testing.memory_storage import MemoryStorage
from model import Call, Model, Outcome, Program, Replay, State

# --- the protocol ----------------------------------------------------------------------------


@dataclass(frozen=True)
class World:
    """What is stored, and where everybody is. Marks: "", "new", "old"; leases: there or not."""

    there: bool = True
    marks: tuple[str, str] = ("", "")
    leases: tuple[bool, bool] = (False, False)
    holders: tuple[str, str] = ("begin", "begin")
    removers: tuple[str, str] = ("begin", "begin")
    replaced: int = 0


def put(values: tuple[Any, Any], who: int, value: object) -> tuple[Any, Any]:
    return (value, values[1]) if who == 0 else (values[0], value)


def holder_steps(w: World, who: int, fault: str) -> Iterator[tuple[str, World]]:
    """Write the lease, look for deletion intents, look for the checkpoint; then release."""

    def at(place: str, world: World = w) -> World:
        return replace(world, holders=put(world.holders, who, place))

    place, seen = w.holders[who], "new" in w.marks
    if place == "begin":
        if fault == "the holder does not look again":
            yield "looks", at("held" if w.there else "refused", put_lease(w, who, on=w.there))
        else:
            yield "puts its lease", at("put", put_lease(w, who, on=True))
    elif place == "put":
        first = w.there if fault == "the checkpoint before the marks" else not seen
        if fault == "no look for marks":
            first = True
        yield "looks once", at("looked" if first else "refused")
    elif place == "looked":
        second = not seen if fault == "the checkpoint before the marks" else w.there
        yield "looks twice", at("held" if second else "refused")
    elif place == "held":
        yield "releases", at("done", put_lease(w, who, on=False))
    elif place == "refused":
        yield "takes it back", at("done", put_lease(w, who, on=False))
    if w.leases[who] and place != "done":
        # A holder that waits longer than the lease lasts does not trust it: it reads its clock.
        yield "'s lease expires", at("done", put_lease(w, who, on=False))


def put_lease(w: World, who: int, *, on: bool) -> World:
    return replace(w, leases=put(w.leases, who, on))


def remover_steps(w: World, who: int, fault: str) -> Iterator[tuple[str, World]]:
    """Put a mark, look for holds, rename; then the facts, and the marks last."""

    def at(place: str, world: World = w) -> World:
        return replace(world, removers=put(world.removers, who, place))

    def mark(value: str, world: World = w) -> World:
        return replace(world, marks=put(world.marks, who, value))

    place = w.removers[who]
    marked = at("marked", mark("new"))
    looked = at("kept" if any(w.leases) else "free")
    if place == "begin":
        begins = {"the removal looks before it marks": looked, "no mark": at("marked")}
        yield "begins", begins.get(fault, marked)
    elif place == "marked":
        yield "looks for holds", looked
    elif place == "kept":
        takes_all = fault == "the marks of others are taken back"
        left = replace(w, marks=("", "")) if takes_all else mark("")
        yield "takes its mark back", at("done", left)
    elif place == "free":
        if fault == "marks go before the rename":
            yield "takes its mark away", at("bare", mark(""))
        elif w.marks[who] != "old" or fault == "who stood still goes on":
            yield "renames", at("renamed", replace(w, there=False))
            takes_back = fault == "the mark of a late rename is taken back"
            yield "'s rename is late", at("late", mark("") if takes_back else w)
        else:
            yield "sees that it stood still", at("kept")
    elif place == "late":
        # The remover had an error, and does not go on.
        yield "'s rename comes late", at("dead", replace(w, there=False))
        yield "'s rename fails late", at("kept")
    elif place == "bare":
        yield "renames", at("renamed", replace(w, there=False))
    elif place == "renamed":
        yield "removes the leases", replace(w, leases=(False, False))
        yield "removes the marks", at("done", replace(w, leases=(False, False), marks=("", "")))
    yield from accidents(w, who, at, mark, fault)


def accidents(
    w: World, who: int, at: Callable[..., World], mark: Callable[..., World], fault: str
) -> Iterator[tuple[str, World]]:
    """Let a remover die, or another take its place, or its mark grow old."""
    place = w.removers[who]
    if place not in ("done", "dead", "late"):
        yield "dies", at("dead")
    if place == "dead" and w.replaced < 2:
        yield "is replaced", at("begin", replace(w, replaced=w.replaced + 1))
    is_renewed = place == "late" and fault != "the mark of a late rename grows old"
    if w.marks[who] == "new" and not is_renewed:
        yield "'s mark grows old", mark("old")


def search(fault: str = "") -> tuple[int, list[str]]:
    """Return how many states there are, and the shortest way to a held one that is gone."""
    came: dict[World, tuple[World, str] | None] = {World(): None}
    queue = deque([World()])
    while queue:
        world = queue.popleft()
        if "held" in world.holders and not world.there:
            return len(came), way_to(world, came)
        for who in (0, 1):
            for name, steps in (("holder", holder_steps), ("remover", remover_steps)):
                for label, after in steps(world, who, fault):
                    if after not in came:
                        came[after] = world, f"{name} {who} {label}"
                        queue.append(after)
    return len(came), []


def way_to(world: World, came: dict[World, tuple[World, str] | None]) -> list[str]:
    steps = []
    while (step := came[world]) is not None:
        world, label = step
        steps.append(label)
    return steps[::-1]


def test_the_protocol_never_loses_what_is_held() -> None:
    num_states, way = search()
    assert way == []
    assert num_states > 20_000


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "fault",
    [
        "the holder does not look again",
        "no look for marks",
        "the checkpoint before the marks",
        "the removal looks before it marks",
        "no mark",
        "the marks of others are taken back",
        "marks go before the rename",
        "who stood still goes on",
        "the mark of a late rename is taken back",
        "the mark of a late rename grows old",
    ],
)
def test_each_mistake_in_the_protocol_is_found(fault: str) -> None:
    assert search(fault)[1]


# --- the real code ---------------------------------------------------------------------------

protections_of = protection_protocol._find_protections

STEP = 7
ATTEMPT = Attempt(1, "a" * 16)
FACTS = f"/runs/.annotations/{STEP}/{ATTEMPT}"


def subject(storage: Storage) -> CheckpointRef:
    return CheckpointRef(storage, "/runs", PATH, (STEP, ATTEMPT))


def holder(*, releases: bool = False) -> Program:
    def take(storage: Storage, _: None) -> str | Outcome:
        try:
            Lease(subject(storage), 60.0, "h" * 16).take()
        except NotFoundError:
            return Outcome("refused")
        return "held" if releases else Outcome("held")

    def release(storage: Storage, _: str) -> Outcome:
        Lease(subject(storage), 60.0, "h" * 16).release()
        return Outcome("released")

    return (take, release) if releases else (take,)


def remover() -> Program:
    def run(storage: Storage, _: None) -> Outcome:
        try:
            told = remove_if_unprotected(
                subject(storage), lambda: removal.remove(storage, PATH, ATTEMPT)
            )
            if told:
                return Outcome("kept")
            remove_annotations(storage, "/runs", (STEP, ATTEMPT), ())
        except CheckpointError:
            return Outcome("failed")
        return Outcome("removed")

    return (run,)


class _Names:
    """Ids that are the same whenever a program is run again from its start."""

    def __init__(self) -> None:
        self._name, self._count = "", 0

    def begin(self, name: str, number: int) -> None:
        self._name, self._count = name, 1000 * number

    def new(self) -> str:
        self._count += 1
        return f"{ord(self._name[-1]):02x}{self._count:014x}"


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> _Names:
    made = _Names()
    for module in (attempts, protection_protocol):
        monkeypatch.setattr(module, "new_id", made.new)
    monkeypatch.setattr(protection_protocol, "new_annotation", _annotation)
    monkeypatch.setattr(protection_protocol, "put_annotation", _put_annotation)
    monkeypatch.setattr(protection_protocol, "_find_protections", _protections_of)
    decode = functools.cache(decode_record)
    monkeypatch.setattr(record_store, "decode_record", decode)
    return made


def _annotation(step: int, attempt: Attempt, kind: str, values: Mapping[str, Scalar]) -> Annotation:
    return Annotation(step, attempt, kind, values, "a test", 1.0)


def _put_annotation(
    storage: Storage, root: str, annotation: Annotation, *, above: int = 0
) -> AnnotationName:
    name = record_store.put_annotation(storage, root, annotation, above=above)
    if isinstance(storage, Replay):
        storage.forget_answers(name)  # nothing else of what it has seen counts any more
    return name


def _protections_of(
    subject: CheckpointRef, others: Iterable[StoredAnnotation], intent: AnnotationName
) -> tuple[str, ...]:
    protections = protections_of(subject, others, intent)
    if isinstance(subject.storage, Replay):
        subject.storage.forget_answers((intent, protections))
    return protections


def begun(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes | None]:
    """Return the files of a checkpoint, without data, and a folder for its annotations."""
    storage = MemoryStorage(
        {"/runs": None, "/runs/.annotations": None, f"/runs/.annotations/{STEP}": None}
    )
    with monkeypatch.context() as patch:
        patch.setattr("dist_ckpt.core.commit.commit_protocol.new_id", lambda: "a" * 16)
        made = save(storage, STEP)
    assert made == ATTEMPT
    files = {p: d for p, d in storage.tree().items() if "safetensors" not in p}
    return {path: data for path, data in files.items() if "msgpack" not in path}


def wrong(state: State) -> str | None:
    """Say whether somebody holds what is gone."""
    held = any(one is not None and one.what == "held" for one in state.outcomes.values())
    if held and f"{PATH}/{ATTEMPT}" not in state.files:
        return "what is held is gone"
    done = [one and one.what for name, one in state.outcomes.items() if name.startswith("remover")]
    if "removed" in done and f"{PATH}/{ATTEMPT}" in state.files:
        return "what was removed is there"
    return None


def explore(
    programs: dict[str, Program], files: dict[str, bytes | None], names: _Names
) -> tuple[int, list[tuple[str, list[str]]]]:
    model = Model(
        programs,
        files,
        prepare=names.begin,
        private=is_private if len(programs) == 2 else is_private_of_three,
    )
    with paused_collector():
        found = list(model.search(wrong))
    return model.num_states, found


def is_private(call: Call) -> bool:
    """Say whether nobody can see a call, or see it apart from the one before."""
    return call[0] in ("make_folder", "create") or (call[0] == "open" and ".record-" in call[1])


def is_private_of_three(call: Call) -> bool:
    """Take annotations as read when they are listed, and what lies in the trash as gone at once."""
    return is_private(call) or call[0] == "open" or ".trash-" in call[1]


@pytest.mark.parametrize(
    "programs",
    [
        {"holder 1": holder(), "remover 2": remover()},
        {"holder 1": holder(releases=True), "remover 2": remover()},
        pytest.param(
            {"holder 1": holder(), "remover 2": remover(), "remover 3": remover()},
            marks=pytest.mark.long,
        ),
        {"holder 1": holder(), "holder 2": holder(), "remover 3": remover()},
    ],
    ids=" ".join,
)
def test_in_no_order_of_the_real_steps_what_is_held_is_gone(programs, names, monkeypatch):
    num_states, found = explore(programs, begun(monkeypatch), names)
    assert found == []
    assert num_states > 100


def check_backwards(subject: CheckpointRef, name: object) -> None:
    """Look for the checkpoint first, as the real code must not."""
    if not subject.exists():
        raise NotFoundError("gone")
    if any(annotation.name.kind == "mark" for annotation in subject.annotations()):
        raise NotFoundError("marked")


def test_a_mistake_in_the_real_steps_is_found(names, monkeypatch):
    files = begun(monkeypatch)
    monkeypatch.setattr(protection_protocol, "_check_protected", check_backwards)
    programs = {"holder 1": holder(), "remover 2": remover()}
    assert explore(programs, files, names)[1]
    monkeypatch.undo()


def test_the_files_of_the_search_are_those_of_the_real_code(monkeypatch) -> None:
    storage = MemoryStorage(begun(monkeypatch))
    Lease(subject(storage), 60.0).take()
    assert [annotation.name.kind for annotation in read_annotations(storage, "/runs")] == ["hold"]
    assert remove_if_unprotected(subject(storage), lambda: None)[0].startswith("leased by process")
    assert list_attempts(storage, PATH) == [ATTEMPT]
    assert FACTS in storage.tree()
