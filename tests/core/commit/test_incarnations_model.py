"""A late writer of an old start never gets in the way of a newer one, whenever it wakes up.

Programs call the real `core/commit/commit_protocol.py` and `core/commit/records/incarnations.py`;
`model.Model` visits every order of their calls, with a death of each at any point. What must hold
is told here once more, by the words of `docs/format.md` and not by the code. Each planted mistake
is found, that every claim takes the next number first of all.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest

from commit_cases import index_of, sizes_of, write_rank
from commit_programs import FixedIds, is_private, make_deterministic, prefix_of
from dist_ckpt.core.commit import attempts, commit_protocol, removal
from dist_ckpt.core.commit.commit_protocol import Claim
from dist_ckpt.core.commit.records import incarnations as starts
from dist_ckpt.core.commit.records import leases, protection_protocol
from dist_ckpt.core.commit.records.incarnations import Incarnation, IncarnationHistory
from dist_ckpt.core.commit.records.record_store import make_record_folders, put_record
from dist_ckpt.core.format import filenames
from dist_ckpt.core.format.filenames import Attempt, parse_attempt
from dist_ckpt.core.format.index import index_json
from dist_ckpt.core.format.index.index import Abandoned, Index
from dist_ckpt.core.format.run_records import IncarnationRecord, decode_record, encode_record
from dist_ckpt.core.runtime.processes import paused_collector
from dist_ckpt.core.storage import Storage
from dist_ckpt.core.storage.storage_wrappers import ForwardingStorage
from dist_ckpt.errors import CheckpointError, ConflictError, NotFoundError
from dist_ckpt.testing.memory_storage import MemoryStorage
from model import Call, Files, Model, Outcome, Program, Replay, State

ROOT = "/runs"
STEPS = (2, 1)

# Whose ids begin how: those of a program by the last letter of its name.
STARTS = {"Z": 0, "A": 1, "B": 1, "C": 2, "D": 2, "E": 3, "F": 3}


REPLACED = "an older start has replaced what a newer one was told is saved"
GONE = "the newest checkpoint that is not orphaned is gone"


def path_of(step: int) -> str:
    return f"{ROOT}/step-{step}"


def owner(attempt: Attempt) -> int:
    """Return the start that has made an attempt, whatever number it gave that."""
    return STARTS[chr(int(attempt.id[:2], 16))]


def there(start: int, name: str) -> Attempt:
    """Return the attempt that lies there when a scenario begins."""
    return Attempt(1000 * start or 5, f"{prefix_of(name)}{start:014x}")


# --- programs --------------------------------------------------------------------------------


def is_late(storage: Storage, start: int) -> bool:
    """Say whether a newer start has begun by now: what begins from here on is to be refused."""
    entries = storage.list(f"{ROOT}/{filenames.INCARNATIONS}")
    return any((filenames.parse_incarnation(entry.name) or 0) > start for entry in entries)


class Watched(ForwardingStorage):
    """Notes whether attempts were taken away by whom this is."""

    has_removed = False

    def rename(self, old: str, new: str) -> None:
        super().rename(old, new)
        self.has_removed = self.has_removed or "/.trash-" in new


def saver(start: int, step: int, *, overwrite: bool = False, looks: bool = True) -> Program:
    """Save as the coordinator of a start does; an outcome says if it was late and went on.

    That is not known of one that does not look whether it is late.
    """
    path, run = path_of(step), Incarnation(ROOT, start)

    def look(storage: Storage, _: object) -> bool:
        return looks and is_late(storage, start)

    def claim(storage: Storage, late: bool) -> Claim | Outcome:
        try:
            made = commit_protocol.claim(
                storage, path, overwrite=overwrite, by=f"start {start}", incarnation=run
            )
        except CheckpointError:
            return Outcome("refused")
        return Outcome("claimed late", made.attempt) if late else made

    def write(storage: Storage, claim: Claim) -> Claim | Outcome:
        try:
            write_rank(storage, claim.folder, step, 0)
            commit_protocol.check_files(storage, claim.folder, sizes_of(step, 1))
        except (CheckpointError, FileNotFoundError):
            return Outcome("failed", claim.attempt)
        return claim

    def look_again(storage: Storage, claim: Claim) -> tuple[bool, Claim]:
        return looks and is_late(storage, start), claim

    def commit(storage: Storage, given: tuple[bool, Claim]) -> Attempt | Outcome:
        late, claim = given
        try:
            commit_protocol.commit(storage, claim, index_of(claim.attempt, step, 1))
        except CheckpointError:
            with suppress(CheckpointError):
                attempts.try_abandon(storage, path, claim.attempt, by="its saver", reason="refused")
            return Outcome("failed", claim.attempt)
        return Outcome("saved late", claim.attempt) if late else claim.attempt

    def last_look(storage: Storage, attempt: Attempt) -> tuple[bool, Attempt]:
        return looks and is_late(storage, start), attempt

    def supersede(storage: Storage, given: tuple[bool, Attempt]) -> Outcome:
        late, attempt = given
        watched = Watched(storage)
        removal.remove_superseded(watched, path, attempt, run)
        return Outcome("removed late" if late and watched.has_removed else "saved", attempt)

    return look, claim, write, look_again, commit, last_look, supersede


def starter(restored: tuple[int, Attempt], *then: Program, after: int = 1) -> Program:
    """Record a start that has restored what it chose when `after` was the newest; go on then."""

    def begin(storage: Storage, _: object) -> object:
        try:
            starts.begin_incarnation(storage, ROOT, restored=restored, why="", by="", after=after)
        except CheckpointError:
            return Outcome("refused")
        return None

    return begin, *(step for program in then for step in program)


def securing(start: int, restored: tuple[int, Attempt]) -> Program:
    """See that nobody replaces what was restored."""

    def secure(storage: Storage, _: object) -> Outcome:
        step, attempt = restored
        try:
            starts.secure_incarnation(
                storage, path_of(step), attempt, Incarnation(ROOT, start), by="it"
            )
        except CheckpointError:
            return Outcome("refused")
        return Outcome("secured", attempt)

    return (secure,)


def choose(storage: Storage, _: object = None) -> tuple[int, int, Attempt] | None:
    """Return the newest start, and the newest checkpoint that is not orphaned."""
    history = starts.read_history(storage, ROOT)
    for step in STEPS:
        if isinstance(storage, Replay):
            storage.forget_answers((step, *history.incarnations.values()))
        with suppress(NotFoundError):
            found, _ = attempts.find_checkpoint(storage, path_of(step))
            if not history.is_orphaned(step, found):
                return history.newest, step, found
    return None


def resumer(*then: Program) -> Program:
    """Choose what to go on from, and record that."""

    def begin(storage: Storage, chosen: tuple[int, int, Attempt] | None) -> object:
        if chosen is None:
            return Outcome("resumed from nothing")
        after, step, attempt = chosen
        try:
            starts.begin_incarnation(
                storage, ROOT, restored=(step, attempt), why="", by="", after=after
            )
        except CheckpointError:
            return Outcome("refused")
        # It saves only above what it went on from.
        return None if then and step == 1 else Outcome(f"resumed from {step}", attempt)

    return choose, begin, *(step for program in then for step in program)


def holder(start: int, restored: tuple[int, Attempt]) -> Program:
    """Restore while it is held, and let it go when the start is recorded."""

    def hold(storage: Storage, _: object) -> Outcome | None:
        try:
            hold_of(storage, restored).take()
        except CheckpointError:
            return Outcome("refused")
        return None

    def begin(storage: Storage, _: object) -> Outcome | None:
        try:
            starts.begin_incarnation(
                storage, ROOT, restored=restored, why="", by="", after=start - 1
            )
        except CheckpointError:
            return Outcome("refused")
        return None

    def release(storage: Storage, _: object) -> Outcome:
        hold_of(storage, restored).release()
        return Outcome("released")

    return hold, begin, release


def hold_of(storage: Storage, where: tuple[int, Attempt]) -> leases.Lease:
    return leases.Lease(
        protection_protocol.CheckpointRef(storage, ROOT, path_of(where[0]), where), 1e9, "a hold"
    )


def pruner(start: int, where: tuple[int, Attempt]) -> Program:
    """Remove what the rules of a start do not keep, as it had seen it before."""
    path = path_of(where[0])

    def prune(storage: Storage, _: object) -> Outcome:
        with suppress(CheckpointError):
            protection_protocol.remove_if_unprotected(
                protection_protocol.CheckpointRef(storage, ROOT, path, where),
                lambda: removal.remove(storage, path, where[1]),
                check=lambda: Incarnation(ROOT, start).check(storage),
            )
        return Outcome("pruned")

    return (prune,)


# --- the check -------------------------------------------------------------------------------


@functools.cache
def _decoded(data: bytes) -> Index | Abandoned:
    return index_json.decode(data)


@functools.cache
def _start(data: bytes) -> IncarnationRecord:
    return decode_record(data, IncarnationRecord, "a start")


@dataclass(frozen=True)
class Root:
    """What files say: the checkpoint of each step, and the starts."""

    found: Mapping[int, Attempt]
    starts: Mapping[int, IncarnationRecord]

    @staticmethod
    def of(files: Files) -> Root:
        found: dict[int, Attempt] = {}
        records: dict[int, IncarnationRecord] = {}
        for path, data in files.items():
            folder, _, name = path.rpartition("/")
            above, _, last = folder.rpartition("/")
            number = filenames.parse_incarnation(name)
            if data and last == filenames.INCARNATIONS and number is not None:
                records[number] = _start(data)
            if data and name == filenames.INDEX and (attempt := parse_attempt(last)):
                step = int(above.rpartition("-")[2])
                is_higher = step not in found or attempt > found[step]
                if is_higher and isinstance(_decoded(data), Index):
                    found[step] = attempt
        return Root(found, records)

    def is_orphaned(self, step: int, attempt: Attempt) -> bool:
        """Say it by the words of the format."""
        return not any(
            owner(attempt) == start and (until is None or step <= until)
            for start, until in self._gone_on_from(max(self.starts), None)
        )

    def _gone_on_from(self, start: int, until: int | None) -> Iterator[tuple[int, int | None]]:
        """Yield the starts that a start goes back to, each with the step up to which it does."""
        yield start, until
        if start in self.starts and (restored := self.starts[start].restored) is not None:
            yield from self._gone_on_from(owner(restored[1]), restored[0])

    @property
    def resumable(self) -> int:
        """The step that the next start goes on from, 0 for none."""
        steps = [step for step, one in self.found.items() if not self.is_orphaned(step, one)]
        return max(steps, default=0)


def restored_by(start: IncarnationRecord) -> int:
    return 0 if start.restored is None else start.restored[0]


def wrong(state: State) -> str | None:
    """Return which promise a state breaks, or None."""
    root = Root.of(state.files)
    told = [one for one in state.outcomes.values() if one is not None]
    if _is_to_be_secured(state) and not any(one.what == "secured" for one in told):
        return None
    promised = [restored_by(root.starts[max(root.starts)])]
    for outcome in told:
        if (problem := _wrong_with(outcome, root, state.files)) is not None:
            return problem
        if outcome.what == "saved" and owner(_attempt_of(outcome)) == max(root.starts):
            promised.append(_step_of(state.files, _attempt_of(outcome)) or 0)
    return GONE if root.resumable < max(promised) else None


def _wrong_with(outcome: Outcome, root: Root, files: Files) -> str | None:
    if outcome.what.endswith(" late"):
        return f"{outcome.what}, though a newer start had begun before"
    if outcome.what == "saved":
        saved = _attempt_of(outcome)
        step = _step_of(files, saved)
        if step is None and not any(owner(one) > owner(saved) for one in root.found.values()):
            return "what was reported saved is gone, and no newer start has replaced it"
        if step is not None and (owner(root.found[step]), root.found[step]) < (owner(saved), saved):
            return REPLACED
    if outcome.what.startswith("resumed from"):
        step, last = int(outcome.what.split()[-1]), max(root.starts)
        before = Root(root.found, {n: one for n, one in root.starts.items() if n < last})
        if before.is_orphaned(step, _attempt_of(outcome)):
            return "a start went on from what is orphaned"
        if step < restored_by(before.starts[last - 1]):
            return "a start went back behind what the one before it went on from"
    return None


def _attempt_of(outcome: Outcome) -> Attempt:
    assert outcome.attempt is not None
    return outcome.attempt


def _step_of(files: Files, attempt: Attempt) -> int | None:
    for step in STEPS:
        if f"{path_of(step)}/{attempt}/{filenames.INDEX}" in files:
            return step
    return None


def _is_to_be_secured(state: State) -> bool:
    return any(name.endswith("secures C") for name in state.outcomes)


def only_one_is_told(state: State) -> str | None:
    saved = [one for one in state.outcomes.values() if one is not None and one.what == "saved"]
    return "two saves of one start at one path succeeded" if len(saved) > 1 else wrong(state)


# --- scenarios -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scenario:
    """Programs by name, and by whom which steps are there, with which starts, when they begin."""

    programs: Mapping[str, Program]
    begins_with: Mapping[int, Attempt]
    starts: tuple[tuple[int, Attempt] | None, ...] = (None,)
    check: Callable[[State], str | None] = wrong
    num_faults: int = 0


ONE = there(1, "A")
OLD = there(0, "Z")
HERE = {1: ONE}
FROM_ONE = (1, ONE)

SCENARIOS = {
    "a late writer": Scenario(
        {"start 1 A": saver(1, 2), "start 2 C": starter(FROM_ONE, saver(2, 2))}, HERE
    ),
    "a late writer, replaying": Scenario(
        {"start 1 A": saver(1, 2, overwrite=True), "start 2 C": starter(FROM_ONE, saver(2, 2))},
        {**HERE, 2: OLD},
    ),
    "a late writer at the step that was restored": Scenario(
        {"start 1 A": saver(1, 1, overwrite=True), "start 2 C": starter(FROM_ONE, saver(2, 2))},
        HERE,
    ),
    "a late writer and a new start": Scenario(
        {
            "start 1 A": saver(1, 2, looks=False),
            "start 2 C": starter(FROM_ONE, saver(2, 2, looks=False)),
            "start 3 E": resumer(),
        },
        HERE,
    ),
    "late writers of two starts": Scenario(
        {"start 1 A": saver(1, 2), "start 2 C": saver(2, 2), "start 3 E": resumer(saver(3, 2))},
        HERE,
        (None, FROM_ONE),
    ),
    "two late writers": Scenario(
        {
            "start 1 A": saver(1, 2),
            "start 1 B": saver(1, 2),
            "start 2 C": starter(FROM_ONE, saver(2, 2)),
        },
        HERE,
    ),
    "two savers of one start": Scenario(
        {"start 1 A": saver(1, 2), "start 1 B": saver(1, 2)}, HERE, check=only_one_is_told
    ),
    "a late writer and a fault": Scenario(
        {"start 1 A": saver(1, 2), "start 2 C": starter(FROM_ONE, saver(2, 2))}, HERE, num_faults=1
    ),
    "starts at once": Scenario(
        {
            "start 1 A": saver(1, 2, looks=False),
            "start 2 C": resumer(saver(2, 2, looks=False)),
            "start 3 E": resumer(),
        },
        HERE,
    ),
    "two starts at once": Scenario(
        {"start 2 C": starter((1, OLD), saver(2, 2, looks=False)), "start 3 E": resumer()},
        {1: OLD, 2: ONE},
        ((1, OLD),),
    ),
    "a start after one that went back": Scenario(
        {"start 1 A": saver(1, 2, overwrite=True), "start 3 E": resumer()},
        {1: ONE, 2: ONE},
        (None, FROM_ONE),
    ),
    "a late writer that is told nothing": Scenario(
        {
            "start 1 A": saver(1, 2, looks=False),
            "start 2 C": starter(FROM_ONE, saver(2, 2, looks=False)),
        },
        HERE,
    ),
    "a late pruner": Scenario(
        {"start 1 A": pruner(1, FROM_ONE), "start 2 C": holder(2, FROM_ONE)}, {1: ONE, 2: ONE}
    ),
    "a start that goes back": Scenario(
        {
            "start 1 A": saver(1, 2, looks=False),
            "secures C": starter((2, OLD), securing(2, (2, OLD))),
            "start 3 E": resumer(),
        },
        {1: OLD, 2: OLD},
        ((1, OLD),),
    ),
}


@pytest.fixture
def ids(monkeypatch, caplog) -> FixedIds:
    caplog.set_level(logging.ERROR)  # of a late writer that leaves things there is a line each time
    return make_deterministic(monkeypatch)


@pytest.fixture
def search(ids: FixedIds) -> Callable[[str], Iterator[tuple[str, list[str]]]]:
    def search(name: str) -> Iterator[tuple[str, list[str]]]:
        """Yield what is wrong, and how it came to that; who wants one only does not go on."""
        scenario = SCENARIOS[name]
        model = Model(
            scenario.programs,
            _files(ids, scenario),
            prepare=ids.begin,
            num_faults=scenario.num_faults,
            private=lambda call: is_private(call) or _is_of_no_effect(call),
        )
        with paused_collector():
            yield from model.search(scenario.check)

    return search


def _files(ids: FixedIds, scenario: Scenario) -> Files:
    ids.begin("what was there", 0)
    storage = MemoryStorage({"/runs": None})
    for number, restored in enumerate(scenario.starts, 1):
        folder = f"{ROOT}/{filenames.INCARNATIONS}"
        make_record_folders(storage, ROOT, folder)
        record = IncarnationRecord(number, "0" * 16, restored, "", "", 0.0)
        put_record(storage, folder, filenames.incarnation_file(number), encode_record(record))
    for step, attempt in scenario.begins_with.items():
        storage.make_folder(path_of(step))
        storage.make_folder(f"{path_of(step)}/{attempt}")
        write_rank(storage, f"{path_of(step)}/{attempt}", step, 0)
        claim = Claim(path_of(step), attempt, f"{path_of(step)}/{attempt}", "", ())
        commit_protocol.commit(storage, claim, index_of(attempt, step, 1))
    return storage.tree()


def _is_of_no_effect(call: Call) -> bool:
    """Say whether a call does and tells the same whenever it is made: of records of starts."""
    folder = f"{ROOT}/{filenames.INCARNATIONS}"
    return call == ("make_folder", folder) or (call[0] == "open" and call[1].startswith(folder))


LARGE = ("a late writer and a new start", "starts at once", "two late writers")


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.long] * (n in LARGE)) for n in SCENARIOS]
)
def test_a_late_writer_is_in_nobodys_way(name, search):
    assert list(search(name)) == []


# --- planted mistakes ------------------------------------------------------------------------


def there_are_no_starts(patch: pytest.MonkeyPatch) -> None:
    """Save as who records no start: with the next number, replacing whatever is there."""
    patch.setattr(Incarnation, "next_attempt", lambda self, highest, path: highest + 1)
    patch.setattr(commit_protocol, "_may_replace", lambda *_, **__: True)
    patch.setattr(Incarnation, "check", lambda *_: None)


def claims_do_not_look_for_newer_starts(patch: pytest.MonkeyPatch) -> None:
    _look_only_in(patch, "commit", "supersede")


def commits_do_not_look_for_newer_starts(patch: pytest.MonkeyPatch) -> None:
    _look_only_in(patch, "claim", "supersede")


def removals_do_not_look_for_newer_starts(patch: pytest.MonkeyPatch) -> None:
    _look_only_in(patch, "claim", "commit")


def _look_only_in(patch: pytest.MonkeyPatch, *names: str) -> None:
    check = Incarnation.check

    def check_in(self: Incarnation, storage: Storage) -> None:
        if sys._getframe(1).f_code.co_name in names:
            check(self, storage)

    patch.setattr(Incarnation, "check", check_in)


def claims_give_way_to_nobody(patch: pytest.MonkeyPatch) -> None:
    abandon_rivals = commit_protocol._abandon_lower_rivals

    def abandon_lower(storage: Storage, path: str, attempt: Attempt, **options: Any) -> None:
        def lower(*where: Any) -> list[Attempt]:
            return [one for one in attempts.list_attempts(*where) if one <= attempt]

        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(commit_protocol, "list_attempts", lower)
            new_folders: list[str] = sys._getframe(1).f_locals["new_folders"]  # noqa: F841  (the step asks)
            abandon_rivals(storage, path, attempt, **options)

    patch.setattr(commit_protocol, "_abandon_lower_rivals", abandon_lower)


def claims_leave_lower_attempts_open(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(commit_protocol, "try_abandon", lambda *_, **__: False)


def starts_do_not_see_those_that_began_meanwhile(patch: pytest.MonkeyPatch) -> None:
    begin = starts.begin_incarnation

    def begin_anyhow(*where: Any, after: int | None = None, **what: Any) -> IncarnationRecord:
        del after
        return begin(*where, **what)

    patch.setattr(starts, "begin_incarnation", begin_anyhow)


def nobody_secures_what_was_restored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(starts, "secure_incarnation", lambda *_, **__: None)


def only_what_is_there_is_secured(patch: pytest.MonkeyPatch) -> None:
    """Look for a later checkpoint, but let open attempts be."""
    patch.setattr(attempts, "try_abandon", lambda *_, **__: True)


def open_attempts_are_secured_and_nothing_else(patch: pytest.MonkeyPatch) -> None:
    secure = starts.secure_incarnation

    def abandon_only(*where: Any, **why: Any) -> None:
        with suppress(ConflictError):
            secure(*where, **why)

    patch.setattr(starts, "secure_incarnation", abandon_only)


def every_later_start_leaves_behind(patch: pytest.MonkeyPatch) -> None:
    """Forget that a start may go back to what an earlier one has orphaned."""

    def is_orphaned(self: IncarnationHistory, step: int, attempt: Attempt) -> bool:
        return any(
            number > attempt.incarnation and (start.restored is None or start.restored[0] < step)
            for number, start in self.incarnations.items()
        )

    patch.setattr(IncarnationHistory, "is_orphaned", is_orphaned)


def nothing_is_left_behind(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(IncarnationHistory, "is_orphaned", lambda *_: False)


def what_is_restored_is_let_go_before_the_start_is_recorded(patch: pytest.MonkeyPatch) -> None:
    begin = starts.begin_incarnation

    def begin_late(storage: Storage, root: str, **what: Any) -> IncarnationRecord:
        hold_of(storage, what["restored"]).release()
        return begin(storage, root, **what)

    patch.setattr(starts, "begin_incarnation", begin_late)


def pruners_look_for_newer_starts_and_then_for_holds(patch: pytest.MonkeyPatch) -> None:
    remove = protection_protocol.remove_if_unprotected

    def look_first(*what: Any, check: Callable[[], None]) -> tuple[str, ...]:
        check()
        return remove(*what)

    patch.setattr(protection_protocol, "remove_if_unprotected", look_first)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("mistake", "name", "told"),
    [
        (there_are_no_starts, "a late writer that is told nothing", REPLACED),
        (claims_do_not_look_for_newer_starts, "a late writer", "claimed late"),
        (commits_do_not_look_for_newer_starts, "a late writer", "saved late"),
        (commits_do_not_look_for_newer_starts, "a start that goes back", GONE),
        (removals_do_not_look_for_newer_starts, "a late writer, replaying", "removed late"),
        (claims_give_way_to_nobody, "two savers of one start", "two saves of one start"),
        (claims_leave_lower_attempts_open, "two savers of one start", "two saves of one start"),
        (
            starts_do_not_see_those_that_began_meanwhile,
            "two starts at once",
            "a start went on from",
        ),
        (nobody_secures_what_was_restored, "a start that goes back", GONE),
        (only_what_is_there_is_secured, "a start that goes back", GONE),
        (open_attempts_are_secured_and_nothing_else, "a start that goes back", GONE),
        (what_is_restored_is_let_go_before_the_start_is_recorded, "a late pruner", GONE),
        (pruners_look_for_newer_starts_and_then_for_holds, "a late pruner", GONE),
        (every_later_start_leaves_behind, "a start that goes back", "a start went back"),
        (nothing_is_left_behind, "a start after one that went back", "a start went on from"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_planted_mistake_is_found(mistake, name, told, search, monkeypatch):
    mistake(monkeypatch)
    assert any(problem.startswith(told) for problem, _ in search(name))
