"""What is stripped holds the rest of a checkpoint, as a new attempt; or nothing has changed."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import dist_ckpt as dc
import ranks
from dist_ckpt.core.commit.attempts import find_checkpoint, list_attempts
from dist_ckpt.core.commit.records.protection_protocol import CheckpointRef, tag
from dist_ckpt.core.commit.records.protections import LEASE, PIN, protections_of
from dist_ckpt.core.commit.records.record_store import read_annotations
from dist_ckpt.core.commit.removal import remove_garbage
from dist_ckpt.core.commit.transaction import Transaction
from dist_ckpt.core.format.objects.objects_file import ObjectsFile
from dist_ckpt.core.storage import Storage
from dist_ckpt.core.storage.local.local_storage import LocalStorage
from dist_ckpt.core.storage.storage_wrappers import ForwardingStorage
from dist_ckpt.errors import CheckpointError, ConflictError, CorruptError, NotFoundError
from dist_ckpt.runs.listing import list_run
from dist_ckpt.runs.metrics import put_metrics
from dist_ckpt.runs.prune import prune
from dist_ckpt.runs.retention_policy import last
from dist_ckpt.testing.crash_storage import CrashStorage, states
from dist_ckpt.testing.faulty_storage import FaultyStorage
from dist_ckpt.testing.memory_storage import MemoryStorage
from dist_ckpt.tools.rewrite import strip
from dist_ckpt.tools.rewrite.strip import strip_at
from linking import PATH, ROOT, NoLinks, inodes, number_at, save, state
from long_mode import IS_LONG, sample, sampled_calls
from ranks import load_on_threads, save_on_threads
from run_folders import committed

torch = pytest.importorskip("torch")

OPTIM = frozenset({"optim"})


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a run of two steps, with facts about the first."""
    root = tmp_path / "run"
    for step in (1, 2):
        dc.save(state(step), root / f"s{step}", step=step)
        dc.Run(root).metrics(step, {"loss": float(step)})
    return root


def left_at(storage: Storage, path: str = PATH) -> str:
    """Say what is there: "all" of the state, what is left "without" the optimizer, or nothing."""
    loaded: dict[str, Any] = {}
    try:
        load_on_threads(storage, [loaded], path)
    except NotFoundError:
        return "nothing"
    told = "all" if "optim" in loaded else "without"
    wanted: dict[str, Any] = state(loaded["lr"])
    for component in [name for name in ("model", "optim") if name in loaded]:
        assert loaded[component].keys() == wanted[component].keys()
        for name, tensor in loaded[component].items():
            assert torch.equal(tensor, wanted[component][name])
    return told


# --- what it is ------------------------------------------------------------------------------


def test_the_rest_stays_in_the_same_files_and_nothing_of_the_component_is_left(root: Path) -> None:
    before, (old, index) = inodes(root / "s1"), find_checkpoint(LocalStorage(), f"{root}/s1")
    report = dc.strip(f"{root}@1", "optim")
    after, (new, stripped) = inodes(root / "s1"), find_checkpoint(LocalStorage(), f"{root}/s1")
    assert list_attempts(LocalStorage(), f"{root}/s1") == [new]
    assert new > old
    assert after.keys() == before.keys() - {"optim-00000.safetensors"}
    assert after["model-00000.safetensors"] == before["model-00000.safetensors"]
    assert (report.num_linked, report.num_files, report.num_tensors) == (1, 2, 2)
    assert report.nbytes_linked == stripped.files[0].nbytes < report.nbytes
    assert stripped.save not in (None, index.save)
    assert (stripped.step, stripped.saved_at) == (index.step, index.saved_at)
    assert "stripped_by" in stripped.saved_by
    catalog = stripped.catalog
    assert [one.stem for one in catalog.components] == ["model"]
    assert len(catalog.layouts) == 2
    assert dc.verify(root / "s1").ok
    assert left_at(LocalStorage(), f"{root}/s1") == "without"
    with pytest.raises(dc.IncompatibleError, match="optim"):
        dc.load(state(0), root / "s1")
    dc.load({"model": state(0)["model"]}, root / "s1", strict=False)


def test_values_aliases_parameters_and_values_of_ranks_go_with_their_component(
    tmp_path: Path,
) -> None:
    model, ema = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    optim = torch.optim.Adam(model.parameters())
    model(torch.ones(3)).sum().backward()
    optim.step()
    whole = {
        "model": model,
        "tied": {"w": model.weight},
        "ema": ema,
        "optim": optim,
        "a": {"b": 3},
        "a.b": {"c": torch.ones(2)},
        "rng": dc.RNG(),
        "loader": dc.PerRank({"at": 3}),
    }
    dc.save(whole, tmp_path / "ck", metadata={"mine": [1]})
    with dc.open(tmp_path / "ck") as before:
        parameters = before.index.catalog.parameters
        pieces: Any = {"model.weight": "pieces", "ema.weight": "pieces"}
        catalog = replace(before.index.catalog, fused=pieces)
        left = strip.drop_from_index(replace(before.index, catalog=catalog), {"ema"}, {*whole})
        assert [*left.catalog.fused] == ["model.weight"]
    dc.strip(tmp_path / "ck", "optim", "a", "tied", "rng", "ema")
    assert dc.verify(tmp_path / "ck").ok
    with dc.open(tmp_path / "ck") as after:
        assert list(after) == ["model.weight", "model.bias", "a.b.c"]
        assert dict(after.objects) == {}
        assert {**after.per_rank["loader"]} == {0: {"at": 3}}
        assert list(after.per_rank) == ["loader"]
        assert after.metadata == {"mine": [1]}
        assert after.index.catalog.aliases == {}
        assert {*(after.index.catalog.versions or ())} == {"model"}
        kept = {name: told for name, told in parameters.items() if name.startswith("model.")}
        assert after.index.catalog.parameters == kept
    loaded: dict[str, Any] = {}
    dc.load(loaded, tmp_path / "ck")
    assert list(loaded) == ["model", "a.b", "loader"]
    dc.strip(tmp_path / "ck", "loader")
    assert "objects-00000.msgpack" not in inodes(tmp_path / "ck")
    assert dc.verify(tmp_path / "ck").ok


def test_what_a_file_says_of_names_goes_with_them() -> None:
    names = ("model.a", "optim.b")
    file = ObjectsFile(numpy=names, objects=names, uncut=dict.fromkeys(names, "whole"))
    left = strip._drop_from_objects(file, OPTIM, {"model", "optim"})
    assert left == ObjectsFile(numpy=names[:1], objects=names[:1], uncut={"model.a": "whole"})


def test_of_several_ranks_each_files_stay(tmp_path: Path) -> None:
    storage = MemoryStorage({ROOT: None})

    def rank(number: int) -> dict[str, object]:
        rows = torch.full((2, 3), float(number))
        shard = dc.LocalShard(rows, (6, 3), (2 * number, 0))
        return {"model": {"w": shard}, "optim": {"m": shard}, f"only {number}": number}

    save_on_threads(storage, [rank(number) for number in range(3)], step=1)
    strip_at(storage, ranks.PATH, frozenset({"optim", "only 1"}))
    loaded: dict[str, Any] = {}
    load_on_threads(storage, [loaded], ranks.PATH)
    assert loaded.keys() == {"model", "only 0", "only 2"}
    rows = torch.arange(3.0).repeat_interleave(2)
    assert torch.equal(loaded["model"]["w"], rows[:, None].expand(6, 3))
    names = [path.rpartition("/")[2] for path in storage.tree() if "/a" in path]
    assert "objects-00001.msgpack" not in names
    assert sum(name.startswith("model-") for name in names) == 3


def test_metrics_tags_and_pin_are_the_new_attempts_and_that_it_was_checked_is_not(
    root: Path,
) -> None:
    run = dc.Run(root)
    run.pin(1, "the paper")
    run.tag(1, "release")
    dc.verify(root / "s1")
    dc.strip(root / "s1", "optim", force=True)
    one = run.find("@tag:release")
    assert (one.step, one.pin, one.metrics) == (1, "the paper", {"loss": 1.0})
    assert not one.is_verified
    assert len(list_attempts(LocalStorage(), f"{root}/s1")) == 1
    run.prune(dc.keep.last(1))
    assert [one.step for one in run.checkpoints] == [1, 2]
    run.unpin(1)
    run.untag("release")
    run.prune(dc.keep.last(1))
    assert [one.step for one in run.checkpoints] == [2]


@pytest.mark.parametrize("guard", ["pin", "tag", "hold"])
def test_what_is_kept_is_not_stripped_unless_it_is_forced(root: Path, guard: str) -> None:
    run = dc.Run(root)
    before = sorted(root.rglob("s1/**/*"))
    if guard == "hold":
        with run.lease(1):
            with pytest.raises(ConflictError, match=r"leased by .*--force"):
                dc.strip(root / "s1", "optim")
            assert sorted(root.rglob("s1/**/*")) == before
            dc.strip(root / "s1", "optim", force=True)
            # Whoever holds it goes on reading it; the checkpoint is the new one.
            assert len(list_attempts(LocalStorage(), f"{root}/s1")) == 2
            assert left_at(LocalStorage(), f"{root}/s1") == "without"
        remove_garbage(LocalStorage(), f"{root}/s1", grace_s=3600)
    else:
        (run.pin if guard == "pin" else run.tag)(1, "why")
        with pytest.raises(ConflictError, match=r"why.*--force"):
            dc.strip(root / "s1", "optim")
        assert sorted(root.rglob("s1/**/*")) == before
        dc.strip(root / "s1", "optim", force=True)
    assert len(list_attempts(LocalStorage(), f"{root}/s1")) == 1
    assert left_at(LocalStorage(), f"{root}/s1") == "without"


def test_what_cannot_be_stripped_is_refused_and_stays(tmp_path: Path) -> None:
    whole = torch.ones(3)
    dc.save({"model": {"w": whole}, "ema": {"w": whole}, "n": 1}, tmp_path / "tied", step=1)
    dc.save({f"c{n}": {"w": whole * n} for n in range(20)}, tmp_path / "many", step=2)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match=r"none: not a component .* model, ema, n"):
        dc.strip(tmp_path / "tied", "n", "none")
    with pytest.raises(ValueError, match=r"ema\.w would lose their data, .* as model\.w"):
        dc.strip(tmp_path / "tied", "model")
    with pytest.raises(ValueError, match="stored in the same files as tensors of c3"):
        dc.strip(tmp_path / "many", "c3")
    with pytest.raises(TypeError, match="components to drop"):
        dc.strip(tmp_path / "tied")
    with pytest.raises(TypeError, match="force"):
        dc.strip(tmp_path / "tied", "n", force=1)  # type: ignore[arg-type]
    with pytest.raises(NotFoundError):
        dc.strip(tmp_path / "gone", "n")
    assert sorted(tmp_path.rglob("*")) == before
    dc.strip(tmp_path / "tied", "ema")  # the name goes, the data are the model's
    with pytest.raises(ValueError, match=r"model, n are all components.*dc\.delete"):
        dc.strip(tmp_path / "tied", "model", "n")
    dc.strip(tmp_path / "tied", "model")
    assert dc.verify(tmp_path / "tied").ok


def test_a_root_that_is_a_symbolic_link_keeps_the_facts_of_the_real_one(
    root: Path, tmp_path: Path
) -> None:
    (tmp_path / "link").symlink_to(root)
    dc.strip(f"{tmp_path}/link/s1", "optim")
    assert dc.Run(root).find(1).metrics == {"loss": 1.0}


def test_where_there_are_no_links_what_stays_is_copied_and_checked(root: Path) -> None:
    before = inodes(root / "s1")
    report = strip_at(NoLinks(LocalStorage()), f"{root}/s1", OPTIM)
    assert report.num_linked == 0
    assert not {*before.values()} & {*inodes(root / "s1").values()}
    assert dc.verify(root / "s1").ok
    (file,) = root.glob("s2/a*/model-00000.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptError, match="damaged"):
        strip_at(NoLinks(LocalStorage()), f"{root}/s2", OPTIM)
    assert len(list_attempts(LocalStorage(), f"{root}/s2")) == 1


# --- others at the same time ------------------------------------------------------------------


class Meeting(ForwardingStorage):
    """Does something once, before the first link."""

    def __init__(self, inner: Storage, act: Any) -> None:
        super().__init__(inner)
        self._act = act

    def link(self, old: str, new: str) -> None:
        act, self._act = self._act, None
        if act is not None:
            act()
        self.inner.link(old, new)


def test_neither_a_prune_nor_a_collector_nor_a_delete_takes_the_source_meanwhile() -> None:
    storage = MemoryStorage({ROOT: None})
    save(storage, 1)
    where = committed(storage, 2)
    put_metrics(storage, ROOT, where, {"loss": 1.0})

    def others() -> None:
        prune(storage, ROOT, last(1), is_whole=lambda _: True)
        remove_garbage(storage, PATH, grace_s=3600)
        assert left_at(storage) == "all"

    strip_at(Meeting(storage, others), PATH, OPTIM)
    assert left_at(storage) == "without"
    assert len(list_attempts(storage, PATH)) == 1
    held = [fact for fact in read_annotations(storage, ROOT) if fact.name.kind == LEASE]
    assert 0 in held[-1].values.values()


def test_a_save_over_it_meanwhile_wins() -> None:
    storage = MemoryStorage({ROOT: None})
    save(storage, 1)

    def overwrite() -> None:
        save_on_threads(storage, [state(5)], PATH, step=1, overwrite=True)

    with pytest.raises((ConflictError, NotFoundError)):
        strip_at(Meeting(storage, overwrite), PATH, OPTIM)
    assert number_at(storage, PATH) == 5


def test_a_save_over_it_just_before_the_claim_is_not_stripped_unseen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    storage = MemoryStorage({ROOT: None})
    save(storage, 1)

    def late(*arguments: Any, **options: Any) -> Any:
        save_on_threads(storage, [state(5)], PATH, step=1, overwrite=True)
        return Transaction(*arguments, **options)

    monkeypatch.setattr(strip, "Transaction", late)
    with pytest.raises(ConflictError, match="replaced meanwhile"):
        strip_at(storage, PATH, OPTIM)
    assert number_at(storage, PATH) == 5


# --- crashes and faults ----------------------------------------------------------------------


def made(disk: Storage) -> None:
    save(disk, 1)
    put_metrics(disk, ROOT, (1, find_checkpoint(disk, PATH)[0]), {"loss": 0.5})


@pytest.mark.parametrize("wrap", [lambda disk: disk, NoLinks], ids=["linked", "copied"])
def test_after_any_crash_it_is_what_it_was_or_stripped_and_can_be_stripped(wrap) -> None:
    disk = CrashStorage()
    disk.make_folder(ROOT)
    disk.sync("/")
    made(disk)
    disk.mark("saved")
    strip_at(wrap(disk), PATH, OPTIM)
    disk.mark("stripped")
    seen = set()
    for point, storage in sample([*states(disk.log, since="saved", limit=20 if IS_LONG else 4)], 4):
        there = left_at(storage)
        seen.add(there)
        assert there in (("without",) if "stripped" in point.marks else ("all", "without")), point
        (one,) = list_run(storage, ROOT, now=0.0).checkpoints
        assert one.metrics == {"loss": 0.5}, point
        remove_garbage(storage, PATH, grace_s=-1)
        assert left_at(storage) == there
        with suppress(ValueError):
            strip_at(storage, PATH, OPTIM, force=True)  # who died may hold it still
        assert left_at(storage) == "without", point
    assert seen == {"all", "without"}


def test_after_any_crash_the_next_strip_moves_what_keeps_it() -> None:
    disk = CrashStorage()
    disk.make_folder(ROOT)
    disk.sync("/")
    made(disk)
    subject = CheckpointRef(disk, ROOT, PATH, (1, find_checkpoint(disk, PATH)[0]))
    tag(subject, "release")
    subject.put(PIN, {"pinned": True, "why": "the paper"})
    disk.mark("saved")
    strip_at(disk, PATH, OPTIM, force=True)
    were_left = set()
    for point, storage in sample([*states(disk.log, since="saved", limit=4)], 3):
        tags = protections_of(read_annotations(storage, ROOT), 0.0).tags
        were_left.add(left_at(storage) == "without" and subject.key in tags)
        with suppress(ValueError):  # it is stripped already
            strip_at(storage, PATH, OPTIM, force=True)
        assert left_at(storage) == "without"
        guards = protections_of(read_annotations(storage, ROOT), 0.0)
        *lower, newest = ((1, attempt) for attempt in list_attempts(storage, PATH))
        assert guards.tags == {newest: ["release"]}, point
        assert guards.pins[newest] == "the paper"
        assert guards.pins.keys().isdisjoint(lower), point  # who died may hold it, no more
    assert were_left == {True, False}


TELLS_OF_A_COMMIT = ("is stripped", "survives a power cut")


@pytest.mark.parametrize("done", [False, True], ids=["not done", "done, but reported as failed"])
def test_an_error_at_any_storage_call_loses_nothing(done: bool) -> None:
    num_linked = 0
    for number in sampled_calls(6):
        storage = MemoryStorage({ROOT: None})
        made(storage)
        subject = CheckpointRef(storage, ROOT, PATH, (1, find_checkpoint(storage, PATH)[0]))
        tag(subject, "release")
        subject.put(PIN, {"pinned": True, "why": "the paper"})
        faulty = FaultyStorage(storage, fail_at_call=number, done=done)
        error: CheckpointError | None = None
        try:
            strip_at(faulty, PATH, OPTIM, force=True)
        except CheckpointError as caught:
            error = caught
        there = left_at(storage)
        (one,) = list_run(storage, ROOT, now=0.0).checkpoints
        assert one.pin == "the paper", faulty.failed
        tags = protections_of(read_annotations(storage, ROOT), 0.0).tags
        assert [*tags.values()] == [["release"]], faulty.failed  # of the old one, or of the new
        if error is not None and there == "without":  # it says so
            assert any(text in str(error) for text in TELLS_OF_A_COMMIT), (faulty.failed, error)
        if error is None:
            assert (there, one.tags) == ("without", ("release",)), faulty.failed
            num_linked += faulty.failed.startswith("link")
        assert there in ("all", "without"), faulty.failed
        if number > faulty.calls:
            break
    assert num_linked == 1 or not IS_LONG
