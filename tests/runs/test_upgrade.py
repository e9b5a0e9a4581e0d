"""A root of dist_ckpt 0.1.0: read as it is, refused to who writes, upgraded whatever kills that."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch

import dist_ckpt as dc
from dist_ckpt.core.commit.commit_protocol import claim
from dist_ckpt.core.commit.records.incarnations import Incarnation, begin_incarnation, read_history
from dist_ckpt.core.commit.records.record_store import (
    new_annotation,
    put_annotation,
    read_annotations,
)
from dist_ckpt.core.commit.removal import remove_all_garbage
from dist_ckpt.core.format.filenames import OLD_ANNOTATIONS, OLD_INCARNATIONS, Attempt
from dist_ckpt.core.format.run_records import IncarnationRecord, decode_record, encode_record
from dist_ckpt.core.format.strict_json import Scalar
from dist_ckpt.core.storage import Entry, Storage, open_storage
from dist_ckpt.errors import (
    ConflictError,
    CorruptError,
    ExistsError,
    IncompatibleError,
    NotFoundError,
    StorageError,
)
from dist_ckpt.runs.listing import list_run
from dist_ckpt.runs.prune import delete_at, prune
from dist_ckpt.runs.retention_policy import last
from dist_ckpt.runs.save_requests import request_save
from dist_ckpt.runs.upgrade import plan_upgrade, upgrade
from dist_ckpt.testing.crash_storage import CrashStorage, states
from dist_ckpt.testing.faulty_storage import FaultyStorage
from dist_ckpt.testing.memory_storage import MemoryStorage
from dist_ckpt.tools.rewrite.copying import plan_backup_at
from long_mode import IS_LONG, sampled_calls

# Written by dist_ckpt 0.1.0: two starts of a Checkpointer, the second restored step 2 of the first,
# a pin, a tag, a metric, a check, a backup, and a lease that does not end in our time.
GOLDEN = Path(__file__).parents[1] / "golden" / "root-of-0.1.0"
ROOT = "/runs"
STEP_3 = "step-00000003"


def tree_of(folder: Path, root: str = ROOT) -> dict[str, bytes | None]:
    """Return a folder as a storage in memory has it."""
    return {
        root: None,
        **{
            f"{root}/{path.relative_to(folder)}": None if path.is_dir() else path.read_bytes()
            for path in sorted(folder.rglob("*"))
        },
    }


def records_only(tree: dict[str, bytes | None]) -> dict[str, bytes | None]:
    """Leave out the data of checkpoints, which nothing here reads."""
    return {path: data for path, data in tree.items() if not path.endswith(".safetensors")}


OLD = records_only(tree_of(GOLDEN))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN, tmp_path / "run"))


def known(storage: Storage, root: str = ROOT) -> tuple[object, ...]:
    """Return what a reader finds, whatever the folders are called."""
    listing = list_run(storage, root, now=0.0)
    facts = {
        (one.step, one.attempt, one.name.kind, one.name.id, str(one.values), one.by, one.problem)
        for one in listing.annotations
    }
    backups = list_run(storage, f"{root}/backup", now=0.0)
    return (
        listing.checkpoints,
        facts,
        read_history(storage, root, with_old=bool(listing.old_folders)),
        [one.metrics for one in backups.checkpoints],
    )


# --- readers ---------------------------------------------------------------------------------


def test_an_old_root_is_listed_with_all_that_protects_its_checkpoints(root: Path) -> None:
    first, second, third, fourth = dc.checkpoints(root)
    assert first.pin == "of the paper"
    assert (second.tags, second.metrics) == (("release",), {"val/loss": 0.5})
    assert second.is_verified
    assert third.leases == ("process 1445 on host",)
    assert [one.is_orphaned for one in (first, second, third, fourth)] == [False] * 3 + [True]


def test_an_old_root_is_read_and_stays_as_it_is(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = tree_of(root)
    with caplog.at_level(logging.WARNING):
        for selector, step in (("latest", 3), ("1", 1), ("tag:release", 2), ("min:val/loss", 2)):
            values = torch.zeros(4)
            assert dc.load({"w": values, "n": -1}, f"{root}@{selector}").step == step
            assert values.tolist() == [0.0, 1.0, 2.0, 3.0]
        dc.load({"w": torch.zeros(4), "n": -1}, root / STEP_3)
        assert dc.verify(f"{root}@latest").ok
        best = dc.Run(root).best(min="val/loss")
        with dc.Checkpointer(root, read_only=True, background=False) as job:
            assert job.restore({"w": torch.zeros(4), "n": -1}) == 3
        dc.copy(f"{root}@2", root.parent / "copy")
    assert best is not None
    assert best.step == 2
    assert tree_of(root) == before
    warned = [one.getMessage() for one in caplog.records if "0.1.0" in one.getMessage()]
    assert len(warned) == 1
    assert warned[0].endswith(f"Run `dist-ckpt upgrade {root}`")


def test_after_the_upgrade_all_is_known_that_was(root: Path) -> None:
    before = [
        (one.name, one.pin, one.tags, one.metrics, one.is_verified, one.is_orphaned)
        for one in dc.checkpoints(root)
    ]
    storage, place = open_storage(root)
    leases = [one.leases for one in dc.checkpoints(root)]
    upgrade(storage, place)
    assert not {*root.iterdir()} & {root / OLD_ANNOTATIONS, root / OLD_INCARNATIONS}
    assert not (root / "backup" / OLD_ANNOTATIONS).exists()
    after = [
        (one.name, one.pin, one.tags, one.metrics, one.is_verified, one.is_orphaned)
        for one in dc.checkpoints(root)
    ]
    assert after == before
    assert [one.leases for one in dc.checkpoints(root)] == leases
    with dc.Checkpointer(root, save=dc.every(steps=1), background=False) as job:
        assert job.restore({"w": torch.zeros(4), "n": -1}) == 3
        job.step(4)
    newest = dc.Run(root).find("@latest").where
    assert newest is not None
    assert (newest[0], newest[1].incarnation) == (4, 3)
    assert dc.verify(f"{root}@latest").ok


def test_an_old_pin_counts_whatever_the_new_folder_says() -> None:
    """Nothing is written next to old records, so those in the new folder are older."""
    storage = MemoryStorage(upgraded(OLD))
    where = 1, Attempt(1000, "35e75e6deeb2d445")
    unpinned: dict[str, Scalar] = {"pinned": False, "why": ""}
    put_annotation(storage, ROOT, new_annotation(*where, "pin", unpinned))
    old = {path: data for path, data in OLD.items() if "/.facts" in path}
    assert list_run(storage, ROOT, now=0.0).checkpoints[0].pin is None
    both_folders = MemoryStorage({**storage.tree(), **old})
    assert list_run(both_folders, ROOT, now=0.0).checkpoints[0].pin == "of the paper"


# --- writers ---------------------------------------------------------------------------------


def _rank() -> dict[str, object]:
    return {"w": torch.zeros(4), "n": -1}


def _async(root: Path, **options: object) -> None:
    with dc.AsyncSaver(root, **options):  # type: ignore[arg-type]
        pass


def _resumed(root: Path, *, background: bool) -> None:
    with dc.Checkpointer(root, background=background) as job:
        job.restore(_rank())


def _leased(root: Path) -> None:
    with dc.Run(root).lease("@latest"):
        pass


WRITERS: dict[str, Callable[[Path], object]] = {
    "save": lambda root: dc.save(_rank(), root / "new", step=9),
    "save over one": lambda root: dc.save(_rank(), root / STEP_3, step=3, overwrite=True),
    "AsyncSaver": _async,
    "AsyncSaver of a job": lambda root: _async(root, job="a-job"),
    "Checkpointer": lambda root: _resumed(root, background=False),
    "Checkpointer in the background": lambda root: _resumed(root, background=True),
    "prune": lambda root: dc.Run(root).prune(dc.keep.last(1)),
    "prune, dry": lambda root: dc.Run(root).prune(dc.keep.last(1), dry_run=True),
    "delete": lambda root: dc.delete(root / "step-00000004"),
    "delete with force": lambda root: dc.delete(root / STEP_3, force=True),
    "pin": lambda root: dc.Run(root).pin(3),
    "unpin": lambda root: dc.Run(root).unpin(1),
    "tag": lambda root: dc.Run(root).tag(3, "x"),
    "untag": lambda root: dc.Run(root).untag("release"),
    "lease": _leased,
    "metrics": lambda root: dc.Run(root).metrics(3, {"loss": 1.0}),
    "backup": lambda root: dc.backup(root / STEP_3),
    "strip": lambda root: dc.strip(root / STEP_3, "n"),
    "copy": lambda root: dc.copy(root / STEP_3, root / "copy"),
    "reshard": lambda root: dc.reshard(root / STEP_3, root / "wide", world_size=2),
}


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("left", [(OLD_ANNOTATIONS,), (OLD_INCARNATIONS,)])
def test_everything_that_writes_is_refused_and_changes_nothing(
    name: str, left: tuple[str, ...], root: Path
) -> None:
    """Also if the root has both: the upgrade that made the new one was killed."""
    for old, new in ((OLD_ANNOTATIONS, ".annotations"), (OLD_INCARNATIONS, ".incarnations")):
        if old not in left:
            (root / old).rename(root / new)
            if new == ".incarnations":
                shutil.rmtree(root / new)
                (root / new).mkdir()
    before = tree_of(root)
    with pytest.raises(IncompatibleError, match=r"0\.1\.0") as caught:
        WRITERS[name](root)
    assert f"dist-ckpt upgrade {root}`" in str(caught.value)
    assert left[0] in str(caught.value)
    assert tree_of(root) == before


CALLS: dict[str, Callable[[Storage], object]] = {
    "claim": lambda s: claim(s, f"{ROOT}/new", overwrite=False, by="x"),
    "claim of a run": lambda s: claim(
        s, f"{ROOT}/new", overwrite=False, by="x", incarnation=Incarnation(ROOT, 3)
    ),
    "claim with force": lambda s: claim(s, f"{ROOT}/{STEP_3}", overwrite=True, by="x", force=True),
    "begin": lambda s: begin_incarnation(s, ROOT, restored=None, why="", by="x"),
    "gc": lambda s: remove_all_garbage(s, ROOT, grace_s=0.0),
    "gc of one": lambda s: remove_all_garbage(s, f"{ROOT}/{STEP_3}", grace_s=0.0),
    "delete": lambda s: delete_at(s, f"{ROOT}/{STEP_3}", force=True),
    "request": lambda s: request_save(s, ROOT, stops=False),
    "backup": lambda s: plan_backup_at(s, f"{ROOT}/{STEP_3}", overwrite=False).run(None),
    "prune": lambda s: prune(s, ROOT, last(1), is_whole=lambda _: True),
}


@pytest.mark.parametrize("name", CALLS)
def test_no_call_below_them_writes_either(name: str) -> None:
    storage = MemoryStorage(OLD)
    with pytest.raises((IncompatibleError, ConflictError), match="upgrade /runs`"):
        CALLS[name](storage)
    assert storage.tree() == OLD


def _train_beside_an_old_start(run: Path) -> None:
    with dc.Checkpointer(run, save=dc.every(steps=1), background=False) as job:
        job.restore(_rank())
        job.step(1)
        shutil.copytree(GOLDEN / OLD_INCARNATIONS, run / OLD_INCARNATIONS)
        job.step(2)


def test_a_start_of_the_old_version_that_comes_later_stops_a_new_job(tmp_path: Path) -> None:
    """It does not see the new one: what is looked for is its record, before each save."""
    run = tmp_path / "run"
    with pytest.raises(ConflictError, match=r"a job of dist_ckpt 0\.1\.0 has begun to write"):
        _train_beside_an_old_start(run)
    assert [one.step for one in dc.checkpoints(run)] == [1]


def test_a_start_of_the_old_version_is_seen_before_the_commit_and_each_removal() -> None:
    storage = MemoryStorage({ROOT: None})
    start = begin_incarnation(storage, ROOT, restored=None, why="", by="x")
    incarnation = Incarnation(ROOT, start.number)
    incarnation.check(storage)
    storage.make_folder(f"{ROOT}/{OLD_INCARNATIONS}")
    with pytest.raises(ConflictError, match="upgrade /runs`"):
        incarnation.check(storage)


class _Listing(MemoryStorage):
    """Notes what is listed of the old folders."""

    def __init__(self, tree: dict[str, bytes | None]) -> None:
        super().__init__(tree)
        self.old: list[str] = []

    def list(self, folder: str, *, follow: bool = True) -> Sequence[Entry]:
        if folder.endswith((OLD_ANNOTATIONS, OLD_INCARNATIONS)):
            self.old.append(folder)
        return super().list(folder, follow=follow)


def test_a_root_that_is_not_old_costs_two_looks_a_claim_and_none_to_read() -> None:
    storage = _Listing({ROOT: None, f"{ROOT}/.annotations": None})
    claim(storage, f"{ROOT}/new", overwrite=False, by="x")
    assert storage.old == [f"{ROOT}/.facts", f"{ROOT}/.starts"]
    storage.old.clear()
    list_run(storage, ROOT, now=0.0)
    assert not storage.old


# --- the upgrade -----------------------------------------------------------------------------


def upgraded(tree: dict[str, bytes | None]) -> dict[str, bytes | None]:
    storage = MemoryStorage(tree)
    upgrade(storage, ROOT)
    return storage.tree()


def both() -> dict[str, bytes | None]:
    """Return a root that was upgraded, and into which 0.1.0 has written since."""
    late = {
        f"{path[:-21]}{path[-21:-5][::-1]}.json" if path.endswith(".json") else path: data
        for path, data in OLD.items()
        if "/.facts" in path
    }
    return {**upgraded(OLD), **late}


def is_upgraded(tree: dict[str, bytes | None]) -> bool:
    return not any(part in path for path in tree for part in ("/.facts", "/.starts"))


@pytest.mark.parametrize("make", [lambda: OLD, both], ids=["renamed", "merged"])
@pytest.mark.parametrize("done", [False, True])
def test_an_upgrade_that_fails_at_any_call_is_finished_by_the_next(
    make: Callable[[], dict[str, bytes | None]], done: bool
) -> None:
    begun = make()
    goal, before = upgraded(begun), known(MemoryStorage(begun))
    assert is_upgraded(goal)
    for number in sampled_calls(9):
        inner = MemoryStorage(begun)
        faulty = FaultyStorage(inner, fail_at_call=number, sticky=True, done=done)
        try:
            upgrade(faulty, ROOT)
        except StorageError:
            left = known(inner)
            if make is not both:  # a number that is given anew is an annotation that is there twice
                assert left[0] == before[0], faulty.failed
            assert left[2] == before[2], faulty.failed
            if not is_upgraded(inner.tree()):
                with pytest.raises(IncompatibleError):
                    claim(inner, f"{ROOT}/x", overwrite=False, by="x")
            upgrade(inner, ROOT)
        assert without_temporary(inner.tree()) == goal, faulty.failed
        if not faulty.failed:
            break
    assert number > 20


def without_temporary(tree: dict[str, bytes | None]) -> dict[str, bytes | None]:
    """Leave out what an earlier call wrote and never renamed: `prune` and `gc` know it by name."""
    return {path: data for path, data in tree.items() if "/.record-" not in path}


@pytest.mark.parametrize("make", [lambda: OLD, both], ids=["renamed", "merged"])
def test_after_any_crash_nothing_is_lost_and_the_next_upgrade_ends_it(
    make: Callable[[], dict[str, bytes | None]],
) -> None:
    begun = make()
    disk = CrashStorage()
    for path, data in begun.items():
        if data is None:
            disk.make_folder(path)
            continue
        writer = disk.create(path, len(data))
        writer.write_at(0, data)
        writer.finish()
    for path in ["/", *(path for path, data in begun.items() if data is None)]:
        disk.sync(path)
    disk.mark("begun")
    goal, before = upgraded(begun), known(MemoryStorage(begun))
    upgrade(disk, ROOT)
    disk.mark("upgraded")
    tried = 0
    for point, storage in islice(
        states(disk.log, since="begun", limit=4), None, None, 1 if IS_LONG else 6
    ):
        tried += 1
        assert known(storage)[2] == before[2], point
        if "upgraded" in point.marks:
            assert is_upgraded(storage.tree()), point
        upgrade(storage, ROOT)
        assert without_temporary(storage.tree()) == goal, point
    assert tried > (10 if IS_LONG else 3)


def test_what_0_1_0_writes_after_an_upgrade_counts_as_newer() -> None:
    storage = MemoryStorage(upgraded(OLD))
    old = MemoryStorage(OLD).tree()
    folder = f"{ROOT}/.facts/1/a1000-35e75e6deeb2d445"
    unpinned = next(data for path, data in old.items() if "/pin-1" in path)
    assert unpinned is not None
    for path in (f"{ROOT}/.facts", f"{ROOT}/.facts/1", folder):
        storage.make_folder(path)
    writer = storage.create(f"{folder}/pin-1-{'0' * 16}.json", len(unpinned))
    writer.write_at(0, unpinned)
    writer.finish()
    upgrade(storage, ROOT)
    pins = [one.name for one in read_annotations(storage, ROOT) if one.name.kind == "pin"]
    assert [(name.number, name.id) for name in pins] == [(1, "1012a155dae39930"), (2, "0" * 16)]


def test_an_old_job_that_is_alive_is_found_before_an_upgrade(root: Path) -> None:
    storage, place = open_storage(root)
    (root / OLD_INCARNATIONS / f"2.alive-{'0' * 16}").touch()
    before = tree_of(root)
    alive = plan_upgrade(storage, place).alive
    plan = plan_upgrade(storage, place, dry_run=True)
    assert tree_of(root) == before
    assert plan.alive == alive
    assert alive[0].startswith("incarnation 2, process 1445 on host, was alive at")
    assert "process 1445 on host has a lease on step 3" in alive
    assert (len(plan.alive), plan.num_annotations, plan.num_incarnations) == (2, 16, 2)
    assert [path.removeprefix(place) for path in plan.folders] == [
        "/backup/.facts",
        "/.facts",
        "/.starts",
    ]


def test_what_cannot_be_upgraded_is_said_before_anything_changes() -> None:
    def refused(kind: type[Exception], told: str, **more: bytes) -> None:
        extra: dict[str, bytes | None] = {f"{ROOT}/{path}": data for path, data in more.items()}
        folders = {path.rpartition("/")[0]: None for path in extra}
        storage = MemoryStorage(tree := OLD | folders | extra)
        with pytest.raises(kind, match=told):
            upgrade(storage, ROOT)
        assert storage.tree() == tree

    refused(CorruptError, "3.json", **{".starts/3.json": b"{}"})
    refused(
        ExistsError,
        r"\.starts has files that dist_ckpt did not write \(notes\)",
        **{".starts/notes": b""},
    )
    refused(ExistsError, r"\.facts has .*\(notes\)", **{".facts/notes": b"", ".annotations/x": b""})
    other = next(
        data for path, data in upgraded(OLD).items() if path.endswith(".incarnations/1.json")
    )
    assert other is not None
    refused(
        CorruptError, "have used this root together", **{".incarnations/2.json": _renumbered(other)}
    )
    with pytest.raises(NotFoundError):
        upgrade(MemoryStorage(OLD), "/nowhere")
    with pytest.raises(ValueError, match="is a checkpoint"):
        upgrade(MemoryStorage(OLD), f"{ROOT}/{STEP_3}")


def _renumbered(data: bytes) -> bytes:
    return encode_record(replace(decode_record(data, IncarnationRecord, "it"), number=2))


def test_a_root_without_old_folders_is_left_as_it_is() -> None:
    tree = upgraded(OLD)
    assert upgraded(tree) == tree
    plan = plan_upgrade(MemoryStorage(tree), ROOT)
    assert (plan.folders, plan.num_annotations, plan.num_incarnations) == ((), 0, 0)


@pytest.mark.parametrize("make", [lambda: OLD, both], ids=["renamed", "merged"])
@pytest.mark.parametrize("name", [OLD_ANNOTATIONS, OLD_INCARNATIONS])
def test_a_file_with_the_name_of_an_old_folder_stays(
    make: Callable[[], dict[str, bytes | None]], name: str
) -> None:
    tree = {path: data for path, data in make().items() if not path.startswith(f"{ROOT}/{name}")}
    file: dict[str, bytes | None] = {f"{ROOT}/{name}": b"not ours"}
    assert upgraded(tree | file) == upgraded(tree) | file
