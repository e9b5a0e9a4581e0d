"""Every interleaving of savers, late ranks, deleters and collectors keeps the promises.

The programs call the real `core/commit/commit_protocol.py`; `model.Model` visits every order of
their calls, with deaths at any point and up to one failed call or lost reply. Each planted mistake
is found.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

import pytest

from commit_cases import PATH, content, index_of, save, sizes_of, write_rank
from commit_programs import FixedIds, is_private, make_deterministic, prefix_of
from dist_ckpt.core.commit import attempts, commit_protocol, removal
from dist_ckpt.core.commit.commit_protocol import Claim
from dist_ckpt.core.format import filenames
from dist_ckpt.core.format.filenames import Attempt, parse_attempt
from dist_ckpt.core.format.index import index_json
from dist_ckpt.core.format.index.index import Abandoned, Index
from dist_ckpt.core.runtime.processes import paused_collector
from dist_ckpt.core.storage import Storage
from dist_ckpt.errors import CheckpointError, NotFoundError
from dist_ckpt.testing.memory_storage import MemoryStorage
from model import Call, Files, Model, Outcome, Program, Replay, State

EMPTY: Files = {"/runs": None}
Search = Callable[[str], Iterator[tuple[str, list[str]]]]

# --- programs; the last letter of a name is in all ids that it makes ----------------------------


def saver(step: int, *, overwrite: bool = False) -> Program:
    """Save as the coordinator does; what comes of it is the outcome."""

    def claim(storage: Storage, _: None) -> Claim | Outcome:
        try:
            return commit_protocol.claim(storage, PATH, overwrite=overwrite, by=f"saver of {step}")
        except CheckpointError:
            return Outcome("refused")

    def write(storage: Storage, claim: Claim) -> tuple[str, Claim]:
        try:
            write_rank(storage, claim.folder, step, 0)
            commit_protocol.check_files(storage, claim.folder, sizes_of(step, 1))
        except (CheckpointError, FileNotFoundError):
            return "give up", claim
        return "commit", claim

    def put(storage: Storage, given: tuple[str, Claim]) -> tuple[str, Claim]:
        what, claim = given
        if what == "commit":
            try:
                commit_protocol.commit(storage, claim, index_of(claim.attempt, step, 1))
            except CheckpointError:
                return "abandon", claim
        return what, claim

    def end(storage: Storage, given: tuple[str, Claim]) -> Outcome | Attempt:
        what, claim = given
        if what == "commit":
            return claim.attempt
        try:
            if what == "abandon" and not attempts.try_abandon(
                storage, PATH, claim.attempt, by=f"saver of {step}", reason="it failed"
            ):
                return Outcome("unknown", claim.attempt)
            commit_protocol.remove_claimed(storage, claim)
        except CheckpointError:
            return Outcome("unknown", claim.attempt)
        return Outcome("failed", claim.attempt)

    return claim, write, put, end, lambda _, attempt: Outcome("saved", attempt)


def overwriter(step: int) -> Program:
    """Save over what is there, and supersede it after the verdict."""

    def supersede(storage: Storage, attempt: Attempt) -> Outcome:
        removal.remove_superseded(storage, PATH, attempt)
        return Outcome("saved", attempt)

    return *saver(step, overwrite=True)[:-1], supersede


def claimer() -> Program:
    """Claim, and die."""
    return saver(9)[0], lambda _, claim: Outcome("died", claim.attempt)


def late_rank_of(name: str) -> Program:
    """Abandon a save or find that it is committed, as a rank does that got no verdict."""

    def abandon(storage: Storage, _: None) -> Outcome:
        try:
            for attempt in attempts.list_attempts(storage, PATH):
                if attempt.id.startswith(prefix_of(name)):
                    failed = attempts.try_abandon(
                        storage, PATH, attempt, by="a rank", reason="late"
                    )
                    return Outcome("failed" if failed else "saved", attempt)
        except CheckpointError:
            pass
        return Outcome("nothing")

    return (abandon,)


def deleter() -> Program:
    def delete(storage: Storage, _: None) -> Outcome:
        try:
            removal.delete(storage, PATH)
        except CheckpointError:
            return Outcome("nothing")
        return Outcome("deleted")

    return (delete,)


def collector() -> Program:
    """Collect without any grace: every open attempt looks dead."""

    def collect(storage: Storage, _: None) -> Outcome:
        with suppress(CheckpointError):
            removal.remove_garbage(storage, PATH, grace_s=-1)
        return Outcome("collected")

    return (collect,)


def reader() -> Program:
    def find(storage: Storage, _: None) -> Outcome:
        try:
            return Outcome("found", attempts.find_checkpoint(storage, PATH)[0])
        except NotFoundError:
            return Outcome("found nothing")

    return (find,)


# --- the check -------------------------------------------------------------------------------


@functools.cache
def _decoded(data: bytes) -> Index | Abandoned:
    return index_json.decode(data)


def committed_in(files: Files) -> dict[Attempt, Index]:
    found: dict[Attempt, Index] = {}
    for path, data in files.items():
        folder, _, name = path.rpartition("/")
        attempt = parse_attempt(folder.removeprefix(f"{PATH}/"))
        if name == filenames.INDEX and attempt and data:
            document = _decoded(data)
            if isinstance(document, Index):
                found[attempt] = document
    return found


def note_deleted(name: str, call: Call, files: Files) -> object | None:
    """Remember the committed attempts that a deleter takes away."""
    attempt = parse_attempt(call[1].rpartition("/")[2])
    return attempt if name.startswith("deleter") and attempt in committed_in(files) else None


def wrong(state: State) -> str | None:
    """Return which promise a state breaks, or None."""
    committed = committed_in(state.files)
    if committed:
        highest = max(committed)
        step = committed[highest].step
        assert step is not None
        for file in committed[highest].files:
            name = f"{PATH}/{highest}/{filenames.shard_file('model', file.rank)}"
            if state.files.get(name) != content(step, file.rank):
                return "a checkpoint shows that is not whole"
    deleted = cast("frozenset[Attempt]", state.notes)
    last = max([*committed, *deleted], default=Attempt(0, ""))
    for outcome in state.outcomes.values():
        if outcome is None:
            continue
        if outcome.what == "saved":
            assert outcome.attempt is not None
            if last < outcome.attempt:
                return "what was reported saved is gone, and nobody deleted it"
        if outcome.what == "failed" and outcome.attempt in committed:
            return "what was reported failed is committed"
        if outcome.what == "found nothing" and not any("deleter" in n for n in state.outcomes):
            return "a reader found nothing while there was a checkpoint all the time"
    return None


def one_saver_wins(state: State) -> str | None:
    saved = {o.attempt for o in state.outcomes.values() if o is not None and o.what == "saved"}
    return "two savers succeeded without overwrite" if len(saved) > 1 else wrong(state)


# --- running ---------------------------------------------------------------------------------


@pytest.fixture
def ids(monkeypatch) -> FixedIds:
    made = make_deterministic(monkeypatch)
    monkeypatch.setattr(removal, "list_statuses", _attempts)
    return made


def _attempts(storage: Storage, path: str) -> tuple[attempts.Status, ...]:
    found = attempts.list_statuses(storage, path)
    if isinstance(storage, Replay):
        # Deleters and collectors begin with it, and do not ask for sizes.
        storage.forget_answers(tuple((status.attempt, status.state) for status in found))
    return found


@dataclass(frozen=True)
class Scenario:
    """Programs by name, and what is there when they begin; up to `num_faults` calls fail."""

    programs: Mapping[str, Program]
    begins_with: str = "nothing"
    num_faults: int = 0
    check: Callable[[State], str | None] = wrong
    every_call: bool = False


TWO_SAVERS = {"saver A": saver(2), "saver B": saver(3)}
TWO_OVERWRITERS = {"saver A": overwriter(2), "saver B": overwriter(3)}

SCENARIOS = {
    "two savers": Scenario(TWO_SAVERS, check=one_saver_wins),
    "two savers, every call": Scenario(TWO_SAVERS, "a folder", 0, one_saver_wins, every_call=True),
    "two savers and a fault": Scenario(TWO_SAVERS, "a folder", 1, one_saver_wins),
    "two savers and a claim": Scenario(
        {**TWO_SAVERS, "claimer C": claimer()}, "a folder", 0, one_saver_wins
    ),
    "a save after a dead one": Scenario(TWO_SAVERS, "a dead save", 0, one_saver_wins),
    "two overwriters": Scenario(TWO_OVERWRITERS, "a checkpoint"),
    "an overwriter and a fault": Scenario({"saver A": overwriter(2)}, "a checkpoint", 1),
    "a saver, a rank and a fault": Scenario(
        {"saver A": saver(2), "rank B": late_rank_of("A")}, "a folder", 1, every_call=True
    ),
    "a saver, a rank and a collector": Scenario(
        {"saver A": saver(2), "rank B": late_rank_of("A"), "collector C": collector()}
    ),
    "an overwriter, a rank and a collector": Scenario(
        {"saver A": overwriter(2), "rank B": late_rank_of("A"), "collector C": collector()},
        "a checkpoint",
    ),
    "an overwriter, a collector and a fault": Scenario(
        {"saver A": overwriter(2), "collector C": collector()}, "a checkpoint", 1
    ),
    "an overwriter and a deleter": Scenario(
        {"saver A": overwriter(2), "deleter B": deleter()}, "a checkpoint", 1
    ),
    "an overwriter, a rank and a deleter": Scenario(
        {"saver A": overwriter(2), "rank B": late_rank_of("A"), "deleter C": deleter()},
        "a checkpoint",
    ),
    "two overwriters and a deleter": Scenario(
        {**TWO_OVERWRITERS, "deleter C": deleter()}, "a checkpoint"
    ),
    "two collectors and a rank": Scenario(
        {"collector A": collector(), "collector B": collector(), "rank C": late_rank_of("there")},
        "a dead save",
    ),
    "an overwriter and a reader": Scenario(
        {"saver A": overwriter(2), "reader B": reader()}, "a checkpoint", every_call=True
    ),
    "a saver, a rank, a collector and a deleter": Scenario(
        {
            "saver A": saver(2),
            "rank B": late_rank_of("A"),
            "collector C": collector(),
            "deleter D": deleter(),
        }
    ),
    "a deleter and a saver": Scenario(
        {"saver A": saver(2), "deleter B": deleter()}, "a checkpoint", 1
    ),
}


@pytest.fixture
def search(ids) -> Search:
    def search(name: str) -> Iterator[tuple[str, list[str]]]:
        """Yield what is wrong, and how it came to that; who wants one only does not go on."""
        scenario = SCENARIOS[name]
        files = _files(ids, scenario.begins_with)
        older = {
            f"older {attempt}": (lambda *_, attempt=attempt: Outcome("saved", attempt),)
            for attempt in committed_in(files)
        }
        model = Model(
            {**scenario.programs, **older},
            files,
            prepare=ids.begin,
            note=note_deleted,
            num_faults=scenario.num_faults,
            private=(lambda _: False) if scenario.every_call else is_private,
        )
        # Millions of states stay alive: to look through them for garbage again and again takes
        # as long as the search.
        with paused_collector():
            yield from model.search(scenario.check)

    return search


def _files(ids: FixedIds, what: str) -> Files:
    storage = MemoryStorage({"/runs": None})
    ids.begin("what was there", 0)
    if what == "a folder":
        storage.make_folder(PATH)
    if what == "a checkpoint":
        save(storage, 1)
    if what == "a dead save":
        claim = commit_protocol.claim(storage, PATH, overwrite=False, by="a saver that died")
        write_rank(storage, claim.folder, 1, 0)
    return storage.tree()


LARGE = ("two savers and a claim", "two overwriters and a deleter", "two savers, every call")


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.long] * (n in LARGE)) for n in SCENARIOS]
)
def test_no_order_of_steps_breaks_a_promise(name, search):
    assert list(search(name)) == []


# --- planted mistakes ------------------------------------------------------------------------


def no_abandon_before_collecting(patch: pytest.MonkeyPatch) -> None:
    real = attempts.try_abandon

    def abandon(storage: Storage, path: str, attempt: Attempt, *, by: str, reason: str) -> bool:
        return by == "`gc`" or real(storage, path, attempt, by=by, reason=reason)

    patch.setattr(removal, "try_abandon", abandon)


def unlink_in_place(patch: pytest.MonkeyPatch) -> None:
    def remove(storage: Storage, path: str, attempt: Attempt) -> None:
        folder = f"{path}/{attempt}"
        with suppress(FileNotFoundError):
            for entry in storage.list(folder):
                storage.remove(f"{folder}/{entry.name}")
            storage.remove(folder)

    patch.setattr(removal, "remove", remove)
    patch.setattr(commit_protocol, "remove", remove)


def claim_does_not_look_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(commit_protocol, "_abandon_lower_rivals", lambda *_, **__: None)


def claim_ignores_higher_attempts(patch: pytest.MonkeyPatch) -> None:
    abandon_rivals = commit_protocol._abandon_lower_rivals

    def abandon_lower(storage: Storage, path: str, attempt: Attempt, **options: Any) -> None:
        lower = lambda *where: [a for a in attempts.list_attempts(*where) if a <= attempt]  # noqa: E731
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(commit_protocol, "list_attempts", lower)
            new_folders: list[str] = sys._getframe(1).f_locals["new_folders"]  # noqa: F841  (the step asks)
            abandon_rivals(storage, path, attempt, **options)

    patch.setattr(commit_protocol, "_abandon_lower_rivals", abandon_lower)


def claim_leaves_lower_attempts_open(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(commit_protocol, "try_abandon", lambda *_, **__: False)


def commit_replaces_the_index(patch: pytest.MonkeyPatch) -> None:
    put = attempts.put_index

    def replace(storage: Storage, path: str, attempt: Attempt, temporary: str) -> object:
        with suppress(FileNotFoundError):
            storage.remove(f"{path}/{attempt}/{filenames.INDEX}")
        return put(storage, path, attempt, temporary)

    patch.setattr(commit_protocol, "put_index", replace)


def patch_abandon(patch: pytest.MonkeyPatch, abandon: Callable[..., bool]) -> None:
    """Have savers and late ranks abandon in another way."""
    for module in (attempts, commit_protocol):
        patch.setattr(module, "try_abandon", abandon)


def lost_replies_are_failures(patch: pytest.MonkeyPatch) -> None:
    def put(storage: Storage, path: str, attempt: Attempt, temporary: str) -> None:
        storage.rename(temporary, f"{path}/{attempt}/{filenames.INDEX}")

    patch.setattr(commit_protocol, "put_index", put)
    patch_abandon(patch, lambda *_, **__: True)


def ranks_look_instead_of_abandoning(patch: pytest.MonkeyPatch) -> None:
    def look(storage: Storage, path: str, attempt: Attempt, **_: object) -> bool:
        return not isinstance(attempts.read_index(storage, path, attempt), Index)

    patch_abandon(patch, look)


def what_exists_counts_as_abandoned(patch: pytest.MonkeyPatch) -> None:
    abandon = attempts.try_abandon
    patch_abandon(patch, lambda *where, **why: abandon(*where, **why) or True)


def supersede_removes_higher_ones_too(patch: pytest.MonkeyPatch) -> None:
    def supersede(storage: Storage, path: str, attempt: Attempt) -> None:
        for other in attempts.list_attempts(storage, path):
            if other != attempt:
                removal.remove(storage, path, other)

    patch.setattr(removal, "remove_superseded", supersede)


def supersede_comes_before_the_commit(patch: pytest.MonkeyPatch) -> None:
    put = attempts.put_index

    def supersede_and_put(storage: Storage, path: str, attempt: Attempt, temporary: str) -> object:
        removal.remove_superseded(storage, path, attempt)
        return put(storage, path, attempt, temporary)

    patch.setattr(commit_protocol, "put_index", supersede_and_put)


def readers_look_once(patch: pytest.MonkeyPatch) -> None:
    def find(storage: Storage, path: str) -> tuple[Attempt, Index]:
        for attempt in reversed(attempts.list_attempts(storage, path)):
            if isinstance(index := attempts.read_index(storage, path, attempt), Index):
                return attempt, index
        raise NotFoundError(path)

    patch.setattr(attempts, "find_checkpoint", find)


@pytest.mark.parametrize(
    ("mistake", "name"),
    [
        (no_abandon_before_collecting, "a saver, a rank and a collector"),
        (unlink_in_place, "a saver, a rank and a collector"),
        (claim_does_not_look_again, "two savers"),
        (claim_ignores_higher_attempts, "two savers"),
        (claim_leaves_lower_attempts_open, "two savers"),
        (commit_replaces_the_index, "a saver, a rank and a fault"),
        (lost_replies_are_failures, "a saver, a rank and a fault"),
        (ranks_look_instead_of_abandoning, "a saver, a rank and a fault"),
        (what_exists_counts_as_abandoned, "a saver, a rank and a fault"),
        (supersede_removes_higher_ones_too, "two overwriters"),
        (supersede_comes_before_the_commit, "an overwriter and a fault"),
        (readers_look_once, "an overwriter and a reader"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_planted_mistake_is_found(mistake, name, search, monkeypatch):
    mistake(monkeypatch)
    assert any(search(name))
