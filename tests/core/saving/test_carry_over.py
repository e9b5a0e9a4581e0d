"""What a load left out is in the next save as well: linked, else copied and checked; or nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import dist_ckpt as dc
from dist_ckpt.core.commit import removal
from dist_ckpt.core.commit.attempts import find_checkpoint, list_attempts
from dist_ckpt.core.shard_io.write.write_or_link import MAX_SHARED
from dist_ckpt.core.storage import Storage
from dist_ckpt.core.storage.storage_wrappers import ForwardingStorage
from dist_ckpt.errors import CheckpointError, CorruptError, NotFoundError
from dist_ckpt.reports import LoadReport, SaveReport
from dist_ckpt.runs.metrics import put_metrics
from dist_ckpt.runs.prune import prune
from dist_ckpt.runs.retention_policy import last
from dist_ckpt.testing.crash_storage import CrashStorage, states
from dist_ckpt.testing.faulty_storage import FaultyStorage
from dist_ckpt.testing.memory_storage import MemoryStorage
from linking import NoLinks, inodes
from long_mode import IS_LONG, sampled_calls
from ranks import (
    Outcome,
    load_on_threads,
    save_on_threads,
    shared_storage,
    try_load_on_threads,
    try_save_on_threads,
)
from subclass_tensors import Quantized

torch = pytest.importorskip("torch")
numpy = pytest.importorskip("numpy")

ROOT, A, B = "/runs", "/runs/a", "/runs/b"


def state(number: int) -> dict[str, Any]:
    """Return a state of several components, every number of which is this one."""
    return {
        "model": {"body": torch.full((7, 10), float(number)), "head": torch.full((3,), number)},
        "optim": {"body": torch.full((5, 2), float(number)), "lr": number},
        "ema": {"body": torch.full((7, 10), float(number))},
        "step": number,
        "loader": dc.PerRank({"at": number}),
    }


def head(number: int) -> dict[str, Any]:
    return {"model": {"head": torch.full((3,), number)}}


def numbers_at(storage: Storage, path: str) -> dict[str, Any] | None:
    """Return the number of the head, and of the rest, of what is there; None if nothing is."""
    loaded: dict[str, Any] = {}
    try:
        load_on_threads(storage, [loaded], path)
    except NotFoundError:
        return None
    rest = loaded["step"]
    wanted = state(rest)
    tops = (("model", "body"), ("optim", "body"), ("ema", "body"))
    assert all(torch.equal(loaded[a][b], wanted[a][b]) for a, b in tops)
    assert loaded["loader"].value == {"at": rest}
    assert loaded["optim"]["lr"] == rest
    assert loaded.keys() == wanted.keys()
    assert loaded["model"].keys() == wanted["model"].keys()
    (found,) = {int(one) for one in loaded["model"]["head"]}
    return {"head": found, "rest": rest}


def part_of(storage: Storage, path: str = A) -> LoadReport:
    return load_on_threads(storage, [head(0)], path, include="model.head")


def saved_by(
    storage_of: Callable[[int], Storage],
    some: Sequence[Any],
    reports: Sequence[Any],
    path: str = B,
    **options: Any,
) -> list[Outcome]:
    """Save `some` on as many ranks, each with its report of a load."""
    each = [{"carry_over": report} for report in reports]
    return try_save_on_threads(storage_of, some, path, each, **options)


def carry(storage: Storage, path: str = B, source: str = A, **options: Any) -> SaveReport:
    """Load the head, change it, and save it with everything."""
    return save_on_threads(storage, [head(9)], path, carry_over=part_of(storage, source), **options)


def with_source(storage: Storage, step: int | None = None) -> Storage:
    save_on_threads(storage, [state(1)], A, step=step)
    return storage


def memory(step: int | None = None) -> MemoryStorage:
    storage = MemoryStorage({ROOT: None})
    with_source(storage, step)
    return storage


# --- what it is ------------------------------------------------------------------------------


def test_whole_components_are_linked_and_what_was_loaded_in_part_is_copied(tmp_path: Path) -> None:
    dc.save(state(1), tmp_path / "a", step=1)
    mine = head(0)
    loaded = dc.load(mine, tmp_path / "a", include="model.head")
    mine["model"]["head"] += 8
    report = dc.save(mine, tmp_path / "b", step=2, carry_over=loaded)
    before, after = inodes(tmp_path / "a"), inodes(tmp_path / "b")
    for stem in ("optim", "ema"):
        assert before[f"{stem}-00000.safetensors"] == after[f"{stem}-00000.safetensors"]
    assert (report.num_linked, report.num_tensors) == (2, 4)
    assert before.keys() & after.keys() == before.keys()
    assert before["model-00000.safetensors"] not in after.values()
    assert dc.verify(tmp_path / "b").ok
    full = state(0)
    assert not dc.load(full, tmp_path / "b").unexpected
    assert torch.equal(full["model"]["head"], torch.full((3,), 9))
    assert torch.equal(full["model"]["body"], state(1)["model"]["body"])
    with dc.open(tmp_path / "b") as there:
        assert there.step == 2
        components = there.index.catalog.components
        assert [one.stem for one in components] == ["model", "optim", "ema", "k00"]
        assert [one.name for one in components] == ["model", "optim", "ema", "model"]


def test_what_was_carried_is_carried_again_and_no_more_components_come_of_it() -> None:
    storage = memory()
    carry(storage)
    for number in range(3):
        carry(storage, f"{ROOT}/{number}", B if number == 0 else f"{ROOT}/{number - 1}")
    index = find_checkpoint(storage, f"{ROOT}/2")[1]
    assert [one.stem for one in index.catalog.components] == ["model", "optim", "ema", "k00"]
    assert numbers_at(storage, f"{ROOT}/2") == {"head": 9, "rest": 1}


def test_a_file_with_many_names_is_copied_so_that_one_bad_sector_does_not_take_them_all() -> None:
    storage = memory()
    linked = [carry(storage, f"{ROOT}/{number}").num_linked for number in range(MAX_SHARED)]
    assert linked == [2] * (MAX_SHARED - 1) + [0]


def test_where_there_are_no_links_all_is_copied_and_counted_as_written() -> None:
    storage = NoLinks(memory())
    report = carry(storage)
    assert (report.num_linked, report.nbytes_linked) == (0, 0)
    assert numbers_at(storage, B) == {"head": 9, "rest": 1}


def test_one_source_may_be_given_as_the_one_of_a_key() -> None:
    storage = memory()
    sources: Any = {"model": dc.Source(A, include="model.head")}
    report = load_on_threads(storage, [head(0)], sources)
    save_on_threads(storage, [head(9)], B, carry_over=report)
    assert numbers_at(storage, B) == {"head": 9, "rest": 1}


def test_a_load_that_took_what_is_there_leniently_carries_the_rest() -> None:
    storage = memory()
    mine = {"step": 0}
    report = load_on_threads(storage, [mine], A, strict=False)
    save_on_threads(storage, [{"step": 1}], B, carry_over=report)
    assert numbers_at(storage, B) == {"head": 1, "rest": 1}
    report = load_on_threads(storage, [state(0)], A)  # nothing is left
    save_on_threads(storage, [{"new": 3}], f"{ROOT}/c", carry_over=report)
    found: dict[str, Any] = {}
    load_on_threads(storage, [found], f"{ROOT}/c")
    assert found == {"new": 3}


def test_what_was_loaded_and_deleted_does_not_come_back_and_the_states_own_name_wins() -> None:
    storage = memory()
    mine = {"model": dict(state(0)["model"]), "step": 0}
    report = load_on_threads(storage, [mine], A, include=["model.body", "step"])
    # `model.body` and `step` were loaded, `model.head` is in the state, though it was not.
    own = {"model": {"head": torch.full((3,), 5)}}
    save_on_threads(storage, [own], B, carry_over=report, exclude=["ema", "loader"])
    found: dict[str, Any] = {}
    load_on_threads(storage, [found], B)
    assert [*found] == ["model", "optim"]
    assert [*found["model"]] == ["head"]
    assert int(found["model"]["head"][0]) == 5


def test_patterns_leave_out_what_is_carried_and_must_match_a_name_of_either() -> None:
    storage = memory()
    report = part_of(storage)
    save_on_threads(storage, [head(2)], B, carry_over=report, exclude=["ema", "optim.l*"])
    catalog = find_checkpoint(storage, B)[1].catalog
    assert {*catalog.tensors} == {"model.head", "model.body", "optim.body"}
    assert [*catalog.values] == ["step"]
    with pytest.raises(ValueError, match=r"exclude: 'model.tail' matches no name"):
        save_on_threads(storage, [head(2)], f"{ROOT}/c", carry_over=report, exclude="model.tail")
    # What is to be saved of the state is no word about what is carried.
    whole = state(3)
    save_on_threads(storage, [whole], f"{ROOT}/c", carry_over=report, include="model.head")
    assert numbers_at(storage, f"{ROOT}/c") == {"head": 3, "rest": 1}
    with pytest.raises(ValueError, match=r"include: 'ema' matches no name"):
        save_on_threads(storage, [head(2)], f"{ROOT}/d", carry_over=report, include="ema")


def test_an_optimizer_of_a_part_of_the_model_gets_the_state_of_the_rest(tmp_path: Path) -> None:
    def training() -> dict[str, Any]:
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
        optim = torch.optim.Adam(model.parameters())
        model(torch.ones(1, 3)).sum().backward()
        optim.step()
        more = {"t": numpy.ones(2), "l": [torch.ones(1), 5]}
        return {"model": model, "optim": optim, "more": more}

    whole, part, full = training(), training(), training()
    dc.save(whole, tmp_path / "a")
    tail = part["model"][1]
    part = {"model": part["model"], "optim": torch.optim.Adam(tail.parameters(), lr=0.5)}
    include = ["model.1", "optim.state.model.1", "optim.param_groups"]
    report = dc.load(part, tmp_path / "a", include=include)
    with torch.no_grad():
        tail.bias.fill_(7)
    dc.save(part, tmp_path / "b", carry_over=report, include=["model.1", "optim"])
    assert dc.verify(tmp_path / "b").ok
    dc.load(full, tmp_path / "b")
    state_of = whole["optim"].state[whole["model"][0].weight]
    assert torch.equal(full["optim"].state[full["model"][0].weight]["exp_avg"], state_of["exp_avg"])
    assert torch.equal(full["model"][1].bias, torch.full((2,), 7.0))
    with dc.open(tmp_path / "b") as there:
        assert len(there.index.catalog.parameters) == 4
    taken: dict[str, Any] = {}
    dc.load(taken, tmp_path / "b")
    assert len(taken["optim"]["param_groups"][0]["params"]) == 4
    assert isinstance(taken["more"]["t"], numpy.ndarray)
    assert taken["more"]["l"] == [torch.ones(1), 5]


def test_a_quantized_tensor_is_carried_and_left_out_as_a_whole() -> None:
    storage = MemoryStorage({ROOT: None})
    weights = [Quantized.of(torch.arange(6.0).reshape(2, 3) + number) for number in range(2)]
    saved = {"w": weights[0], "v": weights[1], "x": 1, "y": {"scale": torch.ones(1)}}
    save_on_threads(storage, [saved], A)
    report = load_on_threads(storage, [{"x": 0}], A, include="x")
    save_on_threads(storage, [{"x": 2}], B, carry_over=report, exclude=["v", "*.scale"])
    assert {*find_checkpoint(storage, B)[1].catalog.tensors} == {"w.qdata", "w.scale"}
    back = {"w": Quantized.of(torch.ones(2, 3)), "x": 0}
    load_on_threads(storage, [back], B)
    assert torch.equal(back["w"].dequantize(), weights[0].dequantize())
    with pytest.raises(ValueError, match=r"exclude: 'v.scale' matches no name"):
        save_on_threads(storage, [{"x": 2}], f"{ROOT}/c", carry_over=report, exclude="v.scale")
    # What was loaded of one, and is not in the state any more, does not come back in parts.
    part = {"w": {"scale": torch.zeros(2, 1)}}
    report = load_on_threads(storage, [part], A, include="w.scale")
    save_on_threads(storage, [{"x": 2}], f"{ROOT}/c", carry_over=report, exclude="y")
    assert {*find_checkpoint(storage, f"{ROOT}/c")[1].catalog.tensors} == {"v.qdata", "v.scale"}


def test_a_list_loses_no_item() -> None:
    storage = MemoryStorage({ROOT: None})
    items = [torch.full((1,), float(number)) for number in range(3)]
    save_on_threads(storage, [{"l": items}], A)
    report = load_on_threads(storage, [{"l": [torch.zeros(1)]}], A, include="l.0")
    match = r"l would be a list without its item 0, .*exclude='l'"
    with pytest.raises(ValueError, match=match):
        save_on_threads(storage, [{"new": items[1]}], B, carry_over=report)
    with pytest.raises(ValueError, match=r"without its item 1"):
        save_on_threads(storage, [{"l": items[:1]}], B, carry_over=report, exclude="l.1")
    save_on_threads(storage, [{"new": items[1]}], B, carry_over=report, exclude="l")
    save_on_threads(storage, [{"l": [items[2]]}], B, carry_over=report, overwrite=True)
    found: dict[str, Any] = {}
    load_on_threads(storage, [found], B)
    assert found["l"] == [items[2], items[1], items[2]]


# --- tied tensors ----------------------------------------------------------------------------


def tied(number: int) -> dict[str, Any]:
    one = torch.full((2, 2), float(number))
    return {"embed": one, "head": one, "third": one, "other": torch.ones(1)}


@pytest.mark.parametrize("name", ["embed", "head"])
def test_a_name_that_was_tied_to_what_was_loaded_stays_tied_to_it(name: str) -> None:
    storage = MemoryStorage({ROOT: None})
    save_on_threads(storage, [tied(1)], A)
    report = load_on_threads(storage, [{name: torch.zeros(2, 2)}], A, include=name)
    save_on_threads(storage, [{name: torch.full((2, 2), 4.0)}], B, carry_over=report)
    catalog = find_checkpoint(storage, B)[1].catalog
    assert catalog.aliases == dict.fromkeys({"embed", "head", "third"} - {name}, name)
    full = tied(0)
    load_on_threads(storage, [full], B)
    assert torch.equal(full["third"], torch.full((2, 2), 4.0))


def test_a_name_that_was_tied_to_what_is_gone_or_is_otherwise_now_keeps_its_own_data() -> None:
    storage = MemoryStorage({ROOT: None})
    save_on_threads(storage, [tied(1)], A)
    report = load_on_threads(storage, [{"embed": torch.zeros(2, 2)}], A, include="embed")
    for now in ({}, {"embed": torch.ones(5)}):
        save_on_threads(storage, [now], B, carry_over=report, overwrite=True)
        catalog = find_checkpoint(storage, B)[1].catalog
        assert catalog.aliases == {"third": "head"}
        found: dict[str, Any] = {}
        load_on_threads(storage, [found], B)
        assert found.keys() == {"head", "third", "other", *now}
        assert torch.equal(found["third"], torch.ones(2, 2))


# --- ranks -----------------------------------------------------------------------------------


def rows(rank: int, ranks: int, number: int) -> dict[str, Any]:
    """Return a rank's rows of a 4 x 3 tensor, and what it has for itself."""
    part = torch.arange(12.0).reshape(4, 3).chunk(ranks)[rank] + number
    shard = dc.LocalShard(part, (4, 3), (rank * 4 // ranks, 0))
    return {
        "model": {"w": shard, f"own{rank}": torch.ones(2)},
        "at": dc.PerRank(rank, key=f"k{rank}"),
    }


@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 1), (1, 2), (4, 2)])
def test_ranks_carry_on_together_what_others_have_saved(before: int, after: int) -> None:
    storage = MemoryStorage({ROOT: None})
    some = [{**rows(rank, before, 1), f"only {rank}": rank} for rank in range(before)]
    save_on_threads(storage, some, A, step=1)
    # Each rank loads what another one does not: all of that is loaded.
    mine: list[dict[str, Any]] = [{f"only {rank}": -1} for rank in range(after)]
    outcomes = try_load_on_threads(shared_storage(storage), mine, A, strict=False)
    reports = [outcome.value for outcome in outcomes]
    news = [{"new": torch.ones(3), "mine": dc.PerRank(rank)} for rank in range(after)]
    saved = saved_by(shared_storage(storage), news, reports)
    assert [outcome.error for outcome in saved] == [None] * after
    index = find_checkpoint(storage, B)[1]
    assert index.catalog.world_size == after
    loaded = sorted(f"only {rank}" for rank in range(min(before, after)))
    assert {f"only {rank}" for rank in range(before)} - {*index.catalog.values} == {*loaded}
    assert saved[0].value is not None
    assert saved[0].value.num_linked == (before if before == after else 0)
    full: dict[str, Any] = {}
    load_on_threads(storage, [full], B)
    assert torch.equal(full["model"]["w"], torch.arange(12.0).reshape(4, 3) + 1)
    assert torch.equal(full["new"], torch.ones(3))
    own = [{"mine": dc.PerRank(-1)} for _ in range(after)]
    load_on_threads(storage, own, B, include="mine")
    assert [one["mine"].value for one in own] == list(range(after))
    keys = dict(index.catalog.per_rank["at"])
    assert [*keys] == [f"k{rank}" for rank in range(before)]
    assert {*keys.values()} <= set(range(after))
    back = [rows(rank, before, 0) for rank in range(before)]
    load_on_threads(storage, back, B, include=["model", "at"], strict=True)
    assert [one["at"].value for one in back] == list(range(before))


def test_what_is_of_the_ranks_of_another_mesh_is_refused() -> None:
    storage = MemoryStorage({ROOT: None})
    meshes = [dc.ShardingConfig({name: 2}) for name in ("dp", "tp")]
    both = [{"t": torch.ones(2), "at": dc.PerRank(rank)} for rank in range(2)]
    save_on_threads(storage, both, A, sharding=meshes[0])
    options: dict[str, Any] = {"sharding": meshes[1], "include": "t"}
    report = load_on_threads(storage, [{"t": torch.ones(2)}] * 2, A, **options)
    news = [{"t": torch.ones(2)}] * 2
    for outcome in saved_by(lambda _: storage, news, [report] * 2, sharding=meshes[1]):
        assert isinstance(outcome.error, ValueError)
        assert "at belongs to the ranks of the mesh" in str(outcome.error)
        assert "exclude='at'" in str(outcome.error)
    assert find_checkpoint(storage, A)
    with pytest.raises(NotFoundError):
        find_checkpoint(storage, B)


def test_ranks_must_carry_on_the_same() -> None:
    storage = memory()
    save_on_threads(storage, [state(1)], f"{ROOT}/c")
    outcomes = try_load_on_threads(lambda _: storage, [head(0), head(0)], A, include="model.head")
    report = outcomes[0].value
    assert report is not None
    other = try_load_on_threads(
        lambda _: storage, [head(0), head(0)], f"{ROOT}/c", include="model.head"
    )[1].value
    for outcome in saved_by(lambda _: storage, [head(2), head(2)], [report, other]):
        assert "the ranks call save with different carry_over" in str(outcome.error)
    for outcome in saved_by(lambda _: storage, [head(2), head(2)], [report, None]):
        assert isinstance(outcome.error, CheckpointError)  # in another phase
    for outcome in saved_by(lambda _: storage, [head(2)], [report]):
        assert "2 ranks have loaded /runs/a, but 1 save" in str(outcome.error)
    with pytest.raises(NotFoundError):
        find_checkpoint(storage, B)


# --- what is refused -------------------------------------------------------------------------


def test_what_is_no_report_of_such_a_load_is_refused() -> None:
    storage = memory()
    options: dict[str, Any] = {"carry_over": A}
    with pytest.raises(TypeError, match=r"carry_over is a str: give the report that dc.load"):
        save_on_threads(storage, [head(2)], B, **options)
    renamed = load_on_threads(
        storage, [{"net": head(0)["model"]}], A, rename={"model": "net"}, include="net.head"
    )
    with pytest.raises(ValueError, match=r"carry_over: /runs/a was loaded with a rename"):
        save_on_threads(storage, [head(2)], B, carry_over=renamed)
    save_on_threads(storage, [state(4)], f"{ROOT}/c")
    sources: Any = {"model": A, "ema": f"{ROOT}/c"}
    both = load_on_threads(storage, [{"model": {}, "ema": {}}], sources)
    with pytest.raises(ValueError, match=r"carry_over: /runs/a and /runs/c were loaded together"):
        save_on_threads(storage, [head(2)], B, carry_over=both)
    with pytest.raises(NotFoundError):
        find_checkpoint(storage, B)


def test_only_dc_save_has_the_option(tmp_path: Path) -> None:
    dc.save(state(1), tmp_path / "a")
    options: Any = {"carry_over": dc.load(head(0), tmp_path / "a", include="model.head")}
    with dc.AsyncSaver() as saver, pytest.raises(TypeError, match="carry_over"):
        saver.save(head(2), tmp_path / "b", **options)
    with pytest.raises(TypeError, match="carry_over"):
        dc.Checkpointer(tmp_path / "run", **options)


def test_where_the_state_has_a_container_or_a_tensor_it_hides_what_was_there(
    caplog: pytest.LogCaptureFixture,
) -> None:
    storage = MemoryStorage({ROOT: None})
    one = torch.ones(1)
    saved = {"a": one, "b": {"c": one, "d": 2}, "lr": 1, "lr.max": 2, "l": [one]}
    save_on_threads(storage, [saved], A)
    report = load_on_threads(storage, [{"lr": 0}], A, include="lr", strict=False)
    now = {"a": {"x": one}, "b": 5, "lr": 7}
    save_on_threads(storage, [now], B, carry_over=report)
    assert "/runs/a: a, b.c, b.d is not carried over: the state has another" in caplog.text
    found: dict[str, Any] = {}
    load_on_threads(storage, [found], B)
    assert found == {"a": {"x": one}, "b": 5, "lr": 7, "lr.max": 2, "l": [one]}
    mixed = {"l": {"k": one}}
    with pytest.raises(ValueError, match=r"l is a dict in the .* saved as a list: .*exclude='l.0'"):
        save_on_threads(storage, [mixed], f"{ROOT}/c", carry_over=report)
    save_on_threads(storage, [mixed], f"{ROOT}/c", carry_over=report, exclude="l.0")


def test_a_source_that_was_replaced_or_deleted_is_not_carried_on() -> None:
    storage = memory()
    report = part_of(storage)
    save_on_threads(storage, [state(2)], A, overwrite=True)
    with pytest.raises(
        NotFoundError, match=r"/runs/a was replaced: .* load again, and pass the new report"
    ):
        save_on_threads(storage, [head(3)], B, carry_over=report)
    removal.delete(storage, A)
    with pytest.raises(NotFoundError, match="load again, and pass the new report"):
        save_on_threads(storage, [head(3)], B, carry_over=report)
    with pytest.raises(NotFoundError):
        find_checkpoint(storage, B)


@pytest.mark.parametrize("links", [True, False])
def test_a_source_that_goes_away_under_the_save_makes_no_checkpoint(links: bool) -> None:
    inner = memory()
    both = try_load_on_threads(lambda _: inner, [head(0), head(0)], A, include="model.head")

    class Goes(ForwardingStorage):
        """Deletes the source once the new attempt was claimed."""

        def create(self, path: str, nbytes: int) -> Any:
            with suppress(NotFoundError):
                removal.delete(inner, A)
            return super().create(path, nbytes)

        def link(self, old: str, new: str) -> None:
            with suppress(NotFoundError):
                removal.delete(inner, A)
            super().link(old, new)

    storage = Goes(inner) if links else NoLinks(Goes(inner))
    reports = [one.value for one in both]
    for outcome in saved_by(lambda _: storage, [head(3), head(3)], reports):
        assert isinstance(outcome.error, NotFoundError)  # on each rank, and no CorruptError
    with pytest.raises(NotFoundError):
        find_checkpoint(inner, B)


@pytest.mark.parametrize(
    ("file", "at", "links"),
    [
        ("model", -1, True),  # loaded in part: copied
        ("ema", -1, False),
        ("ema", 20, True),  # of what is linked the header is looked at
        ("objects", 30, True),
    ],
)
def test_a_damaged_source_makes_no_checkpoint(
    tmp_path: Path, file: str, at: int, links: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    dc.save(state(1), tmp_path / "a")
    report = dc.load(head(0), tmp_path / "a", include="model.head")
    (damaged,) = (tmp_path / "a").glob(
        f"a*/{file}*0.[sm]*" if file == "objects" else f"a*/{file}*s"
    )
    data = bytearray(damaged.read_bytes())
    data[at] ^= 1
    damaged.write_bytes(data)
    if not links:
        refuse = NoLinks(MemoryStorage()).link
        monkeypatch.setattr(
            "dist_ckpt.core.storage.local.local_storage.LocalStorage.link",
            lambda _, a, b: refuse(a, b),
        )
    with pytest.raises(CorruptError):
        dc.save(head(2), tmp_path / "b", carry_over=report)
    assert not [*tmp_path.glob("b/*")]


# --- others meanwhile, crashes and faults ----------------------------------------------------


def test_a_prune_does_not_take_the_source_meanwhile() -> None:
    inner = memory(step=1)
    save_on_threads(inner, [state(1)], f"{ROOT}/z", step=9)
    kept_with_records(inner)
    report = part_of(inner)
    pruned: list[object] = []

    class Pruning(ForwardingStorage):
        def link(self, old: str, new: str) -> None:
            prune(inner, ROOT, last(1), is_whole=lambda _: True)
            pruned.append(find_checkpoint(inner, A))
            super().link(old, new)

    save_on_threads(Pruning(inner), [head(3)], B, carry_over=report, step=5)
    assert len(pruned) == 2
    prune(inner, ROOT, last(1), is_whole=lambda _: True)
    with pytest.raises(NotFoundError):
        find_checkpoint(inner, A)


def kept_with_records(storage: Storage) -> None:
    """Have the root keep records, as a run does."""

    attempt, index = find_checkpoint(storage, A)
    put_metrics(storage, ROOT, (index.step or 0, attempt), {"loss": 0.5})


def test_a_save_over_its_own_source_replaces_it() -> None:
    storage = memory(step=1)
    kept_with_records(storage)
    before = list_attempts(storage, A)
    carry(storage, A, A, overwrite=True, step=1)
    assert numbers_at(storage, A) == {"head": 9, "rest": 1}
    (now,) = list_attempts(storage, A)
    assert now not in before
    with pytest.raises(NotFoundError, match="was replaced"):
        save_on_threads(
            storage,
            [head(3)],
            A,
            carry_over=replace(part_of(storage), attempt=before[0].name),
            overwrite=True,
        )


def stale(report: LoadReport, attempt: str) -> LoadReport:
    from dataclasses import replace

    return replace(report, attempt=attempt)


@pytest.mark.parametrize("wrap", [lambda disk: disk, NoLinks], ids=["links", "no links"])
def test_after_any_crash_both_are_whole_or_the_new_one_is_not_there(wrap: Any) -> None:
    disk = CrashStorage()
    disk.make_folder(ROOT)
    disk.sync("/")
    with_source(disk)
    report = part_of(disk)
    disk.mark("saved")
    save_on_threads(wrap(disk), [head(9)], B, carry_over=report)
    disk.mark("carried")
    seen = set()
    for point, storage in states(disk.log, since="saved", limit=20 if IS_LONG else 3):
        assert numbers_at(storage, A) == {"head": 1, "rest": 1}, point
        there = numbers_at(storage, B)
        seen.add(there is None)
        assert there == {"head": 9, "rest": 1} if "carried" in point.marks else True, point
        assert there in (None, {"head": 9, "rest": 1}), point
    assert seen == {True, False}


@pytest.mark.parametrize("done", [False, True], ids=["not done", "done, but reported as failed"])
def test_an_error_at_any_storage_call_makes_no_checkpoint_or_a_whole_one(done: bool) -> None:
    for number in sampled_calls(4):
        inner = memory()
        report = part_of(inner)
        storage = FaultyStorage(inner, fail_at_call=number, done=done)
        error: CheckpointError | None = None
        try:
            save_on_threads(storage, [head(9)], B, carry_over=report)
        except CheckpointError as raised:
            error = raised
        there = numbers_at(inner, B)
        assert numbers_at(inner, A) == {"head": 1, "rest": 1}
        assert there in (None, {"head": 9, "rest": 1}), (storage.failed, error)
        assert there is not None or error is not None, storage.failed
        if not storage.failed:
            break
