"""Whatever a crash leaves behind, what was reported saved loads, and nothing else shows.

Every scenario runs the real `core/commit/commit_protocol.py` on a `CrashStorage`, whose recording
tells each state in which a file system may come back. The marks in it say what was reported to
whom; `allowed` says which checkpoints may then be seen. That the check is sharp is shown by taking
things away: each finish and each sync, and the order of the steps.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import FrameType

import pytest

from commit_cases import (
    PATH,
    content,
    index_of,
    names_in,
    objects,
    save,
    sizes_of,
    step_at,
    write_rank,
)
from dist_ckpt.core.commit import attempts, commit_protocol, removal
from dist_ckpt.core.commit.commit_protocol import Claim
from dist_ckpt.core.format import filenames
from dist_ckpt.core.storage import Storage, WritableFile
from dist_ckpt.errors import CheckpointError, ConflictError, StorageError
from dist_ckpt.testing.crash_storage import CrashPoint, CrashStorage, Operation, states
from dist_ckpt.testing.faulty_storage import FaultyStorage
from dist_ckpt.testing.memory_storage import MemoryStorage
from long_mode import sample, sampled_params

Scenario = Callable[[CrashStorage], None]


class KilledError(BaseException):
    """Ends a process where it stands: no cleaning up catches it."""


# --- scenarios -------------------------------------------------------------------------------


def begin(disk: CrashStorage, step: int, *, ranks: int = 1, overwrite: bool = False) -> Claim:
    """Claim, and write all files of a step, each rank as its own client."""
    disk.mark(f"saving {step}")
    claim = commit_protocol.claim(
        disk.client("rank 0"), PATH, overwrite=overwrite, by=f"saver of {step}"
    )
    for rank in range(ranks):
        write_rank(disk.client(f"rank {rank}"), claim.folder, step, rank)
    return claim


def put(disk: CrashStorage, step: int, *, ranks: int = 1, overwrite: bool = False) -> Claim:
    """Save a step up to the verdict."""
    storage = disk.client("rank 0")
    claim = begin(disk, step, ranks=ranks, overwrite=overwrite)
    commit_protocol.check_files(storage, claim.folder, sizes_of(step, ranks))
    commit_protocol.commit(storage, claim, index_of(claim.attempt, step, ranks))
    disk.mark(f"saved {step}")
    return claim


def save_overwrite_delete(disk: CrashStorage, ranks: int = 1) -> None:
    put(disk, 1, ranks=ranks)
    claim = put(disk, 2, ranks=ranks, overwrite=True)
    removal.remove_superseded(disk.client("rank 0"), PATH, claim.attempt)
    disk.mark("deleting")
    removal.delete(disk.client("deleter"), PATH)
    disk.mark("deleted")


def delete_where_two_are_committed(disk: CrashStorage) -> None:
    put(disk, 1)
    put(disk, 2, overwrite=True)  # and its saver died before it removed the first
    disk.mark("deleting")
    removal.delete(disk, PATH)
    disk.mark("deleted")


def verdict_lost_after_the_rename(disk: CrashStorage) -> None:
    """The coordinator dies between the rename of the index and its sync; a rank abandons it."""
    claim = begin(disk, 1)
    with pytest.raises(KilledError):
        commit_protocol.commit(_KilledAtSync(disk), claim, index_of(claim.attempt, 1, 1))
    assert not attempts.try_abandon(disk, PATH, claim.attempt, by="rank 1", reason="no verdict")
    disk.mark("saved 1")


def rank_gives_up(disk: CrashStorage) -> None:
    """A rank abandons before the commit; the attempt is removed, the older checkpoint stays."""
    put(disk, 1)
    claim = begin(disk, 2, overwrite=True)
    assert attempts.try_abandon(disk, PATH, claim.attempt, by="rank 1", reason="no verdict")
    disk.mark("failed 2")
    commit_protocol.remove_claimed(disk, claim)


def rank_gives_up_on_a_full_disk(disk: CrashStorage) -> None:
    claim = begin(disk, 1)
    full = _Full(disk)
    assert attempts.try_abandon(full, PATH, claim.attempt, by="rank 1", reason="no space")
    disk.mark("failed 1")


def later_claim_fences_a_dead_save(disk: CrashStorage) -> None:
    begin(disk, 1)
    claim = begin(disk, 2)
    disk.mark("failed 1")
    commit_protocol.commit(disk, claim, index_of(claim.attempt, 2, 1))
    disk.mark("saved 2")


def collector_finishes_a_delete(disk: CrashStorage) -> None:
    """The deleter is killed between the rename and its sync; a collector finds the trash."""
    put(disk, 1)
    disk.mark("deleting")
    with pytest.raises(KilledError):
        removal.delete(_KilledAtSync(disk), PATH)
    removal.remove_garbage(disk, PATH, grace_s=3600)
    disk.mark("deleted")


def collector_finds_an_overwrite_that_was_not_synced(disk: CrashStorage) -> None:
    """The saver is killed between the rename of its index and the sync, or that sync fails."""
    put(disk, 1)
    claim = begin(disk, 2, overwrite=True)
    with pytest.raises(KilledError):
        commit_protocol.commit(_KilledAtSync(disk), claim, index_of(claim.attempt, 2, 1))
    removal.remove_garbage(disk, PATH, grace_s=3600)


def failed_overwrite(disk: CrashStorage) -> None:
    put(disk, 1)
    claim = begin(disk, 2, overwrite=True)
    commit_protocol.remove_claimed(disk, claim)
    disk.mark("failed 2")


SCENARIOS: tuple[Scenario, ...] = (
    save_overwrite_delete,
    delete_where_two_are_committed,
    verdict_lost_after_the_rename,
    rank_gives_up,
    rank_gives_up_on_a_full_disk,
    later_claim_fences_a_dead_save,
    collector_finishes_a_delete,
    collector_finds_an_overwrite_that_was_not_synced,
    failed_overwrite,
)


class _KilledAtSync(FaultyStorage):
    """Kills its process when that is about to sync a folder."""

    def call(self, what, act):
        if what.startswith("sync"):
            raise KilledError
        return act()


class _Full(FaultyStorage):
    """No file can be made any more."""

    def call(self, what, act):
        if what.startswith("create"):
            raise StorageError("no space")
        return act()


# --- the check -------------------------------------------------------------------------------


def allowed(marks: tuple[str, ...]) -> set[int | None]:
    """Return the steps that may be seen after these reports; None is no checkpoint."""
    steps: set[int | None] = {None}
    for mark in marks:
        match mark.split():
            case ["saving", step]:
                steps.add(int(step))
            case ["saved", step]:
                steps = {int(step)}
            case ["failed", step]:
                steps.discard(int(step))
            case ["deleting"]:
                steps.add(None)
            case ["deleted"]:
                steps = {None}
    return steps


def wrong(point: CrashPoint, storage: MemoryStorage) -> str | None:
    """Return what is wrong with a state, or None."""
    try:
        step = step_at(storage)
        if step not in allowed(point.marks):
            return f"{point}: step {step} shows"
        for mark in point.marks:
            if mark.startswith("failed"):
                _survivor_commits(storage, int(mark.removeprefix("failed ")))
                if (step := step_at(storage)) not in allowed(point.marks):
                    return f"{point}: a coordinator that survived committed step {step}"
    except (AssertionError, FileNotFoundError, CheckpointError) as error:
        return f"{point}: {error!r}"
    return None


def _survivor_commits(storage: MemoryStorage, step: int) -> None:
    """Let the coordinator of a step that was reported failed try to commit it all the same."""
    for attempt in attempts.list_attempts(storage, PATH):
        claimed = Claim(PATH, attempt, f"{PATH}/{attempt}", "me", ())
        if f"a{step}-" in attempt.name:
            with pytest.raises(ConflictError):
                commit_protocol.commit(storage, claimed, index_of(attempt, step, 1))


def violations(scenario: Scenario, disk: CrashStorage, *, own_syncs: bool = False) -> Iterator[str]:
    scenario(disk)
    for point, storage in states(disk.log, own_syncs=own_syncs):
        if (found := wrong(point, storage)) is not None:
            yield found


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.__name__)
def test_after_any_crash_what_was_saved_loads_and_nothing_else_shows(scenario):
    assert list(violations(scenario, CrashStorage())) == []


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, pytest.param(3, marks=pytest.mark.long)])
@pytest.mark.parametrize("own_syncs", [False, True])
def test_the_same_holds_for_several_ranks_whose_syncs_cover_their_own_names_only(ranks, own_syncs):
    def scenario(disk: CrashStorage) -> None:
        save_overwrite_delete(disk, ranks)

    assert list(violations(scenario, CrashStorage(), own_syncs=own_syncs)) == []


@pytest.mark.parametrize("scenario", sampled_params(SCENARIOS, 3), ids=lambda s: s.__name__)
def test_after_any_crash_a_collector_and_the_next_save_find_their_way(scenario):
    disk = CrashStorage()
    scenario(disk)
    for _, storage in states(disk.log):
        before = step_at(storage)
        removal.remove_garbage(storage, PATH, grace_s=-1)
        assert step_at(storage) == before
        save(storage, 9, overwrite=True)
        assert step_at(storage) == 9
        assert len(names_in(storage)) == 1


# --- the check is sharp ----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_without_any_one_finish_or_sync_of_save_overwrite_delete_a_crash_does_harm(ranks):
    def scenario(disk: CrashStorage) -> None:
        save_overwrite_delete(disk, ranks)

    whole = CrashStorage()
    scenario(whole)
    unharmed = []
    for number in sample(range(1, whole.num_syncs + 1), 4):
        dropped: list[str] = []

        def forget(
            n: int, operation: Operation, number: int = number, dropped: list[str] = dropped
        ) -> bool:
            if n == number:
                dropped.append(str(operation))
            return n == number

        if not any(violations(scenario, CrashStorage(forget=forget), own_syncs=ranks > 1)):
            unharmed += dropped
    # The claim's bytes matter where the disk is full: see the next test.
    assert [what for what in unharmed if ".claim-" not in what] == []


def test_without_the_finish_of_a_claim_a_crash_on_a_full_disk_does_harm():
    def forget(_: int, operation: Operation) -> bool:
        return operation.kind == "finish" and ".claim-" in operation.path

    assert any(violations(rank_gives_up_on_a_full_disk, CrashStorage(forget=forget)))


def _site() -> str:
    """Return the line of the library, or of the simulated rank, that called the storage."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.parts[-4:-1] == ("dist_ckpt", "core", "commit") or path.name == "commit_cases.py":
            return f"{path.stem}.{frame.f_code.co_name}:{frame.f_lineno}"
        frame = frame.f_back
    raise AssertionError("neither the library nor a rank has called")


def test_every_line_that_finishes_or_syncs_is_needed_in_some_crash():
    sites: dict[str, list[Scenario]] = {}
    for scenario in SCENARIOS:

        def note(n: int, operation: Operation, scenario=scenario) -> bool:
            sites.setdefault(f"{operation.kind} at {_site()}", []).append(scenario)
            return False

        scenario(CrashStorage(forget=note))
    assert len(sites) >= 8

    def needed(site: str) -> bool:
        def forget(n: int, operation: Operation) -> bool:
            return f"{operation.kind} at {_site()}" == site

        return any(
            True
            for scenario in dict.fromkeys(sites[site])
            for _ in violations(scenario, CrashStorage(forget=forget))
        )

    assert [site for site in sites if not needed(site)] == []


def _steps_of_a_save(
    disk: CrashStorage, claim: Claim, step: int
) -> Mapping[str, Callable[[], object]]:
    """Return what happens after the claim, one step after the other, on two ranks."""
    files: dict[int | str, WritableFile] = {}

    def create(rank: int) -> None:
        name = filenames.shard_file("model", rank)
        files[rank] = disk.create(f"{claim.folder}/{name}", len(content(step, rank)))
        if rank == 0:
            files["objects"] = disk.create(
                f"{claim.folder}/{filenames.OBJECTS}", len(objects(step))
            )
            files["objects"].write_at(0, objects(step))

    def write(rank: int) -> None:
        files[rank].write_at(0, content(step, rank))

    def finish(rank: int) -> None:
        files[rank].finish()
        if rank == 0:
            files["objects"].finish()

    return {
        **{f"create {r}": partial(create, r) for r in (0, 1)},
        **{f"write {r}": partial(write, r) for r in (0, 1)},
        **{f"finish {r}": partial(finish, r) for r in (0, 1)},
        "sync": lambda: disk.sync(claim.folder),
        "commit": lambda: commit_protocol.commit(disk, claim, index_of(claim.attempt, step, 2)),
        "acknowledge": lambda: disk.mark(f"saved {step}"),
        "supersede": lambda: removal.remove_superseded(disk, PATH, claim.attempt),
    }


def _save_in_order(move: str, before: str) -> Scenario:
    def scenario(disk: CrashStorage) -> None:
        put(disk, 1)
        disk.mark("saving 2")
        claim = commit_protocol.claim(disk, PATH, overwrite=True, by="saver of 2")
        steps = _steps_of_a_save(disk, claim, 2)
        names = [name for name in steps if name != move]
        names.insert(names.index(before), move)
        for name in names:
            steps[name]()

    return scenario


@pytest.mark.slow
@pytest.mark.parametrize(
    ("move", "before"),
    sampled_params(
        [
            *(
                ("commit", f"{what} {rank}")
                for what in ("create", "write", "finish")
                for rank in (0, 1)
            ),
            ("commit", "sync"),
            ("sync", "create 1"),
            ("acknowledge", "commit"),
            ("supersede", "commit"),
        ],
        4,
    ),
)
def test_with_a_step_moved_before_what_it_depends_on_a_crash_does_harm(move, before):
    assert any(violations(_save_in_order(move, before), CrashStorage()))


def test_the_same_steps_in_their_order_do_no_harm():
    assert list(violations(_save_in_order("commit", "acknowledge"), CrashStorage())) == []


def test_deleting_the_newest_first_would_bring_back_an_older_one(monkeypatch):
    monkeypatch.setattr(
        removal, "list_statuses", lambda *where: attempts.list_statuses(*where)[::-1]
    )
    assert any(violations(delete_where_two_are_committed, CrashStorage()))


def test_removing_files_before_the_folder_is_renamed_would_leave_a_hollow_one(monkeypatch):
    def unlink_in_place(storage: Storage, path: str, attempt: filenames.Attempt) -> None:
        for entry in storage.list(f"{path}/{attempt}"):
            storage.remove(f"{path}/{attempt}/{entry.name}")
        storage.remove(f"{path}/{attempt}")

    monkeypatch.setattr(removal, "remove", unlink_in_place)
    assert any(violations(save_overwrite_delete, CrashStorage()))
