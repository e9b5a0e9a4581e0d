"""One load from several checkpoints: a mapping, a list, and what of each is taken."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

import dist_ckpt as dc
from dist_ckpt.core.comm.exchange import channel
from dist_ckpt.core.comm.session import Session
from dist_ckpt.core.loading import load as loading
from dist_ckpt.core.loading.check_load import check_load
from dist_ckpt.core.loading.load import load_together
from dist_ckpt.core.loading.load_options import LoadOptions
from dist_ckpt.core.storage.local.local_storage import LocalStorage
from dist_ckpt.testing.memory_storage import MemoryStorage
from dist_ckpt.testing.thread_channel import TEST_CONFIG
from ranks import errors_of, load_on_threads, save_on_threads, try_load_on_threads, try_ranks


class Net(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.encoder, self.head = nn.Linear(3, 3), nn.Linear(3, 2)
        for parameter in self.parameters():
            nn.init.constant_(parameter, value)


def trained(value: float, *, groups: int = 1) -> dict[str, Any]:
    """Return a state in which everything is made of one number."""
    net = Net(value)
    parts = [net.encoder, net.head] if groups == 2 else [net]
    optim = torch.optim.SGD(
        [{"params": [*part.parameters()]} for part in parts], lr=value, momentum=0.5
    )
    for parameter in net.parameters():
        optim.state[parameter]["momentum_buffer"] = torch.full_like(parameter, value)
    return {"model": net, "optim": optim, "epoch": value}


def model_of(state: Mapping[str, Any]) -> dict[str, float]:
    """Return the number that each half of the model is made of."""
    return {
        name: {v for p in half.parameters() for v in p.flatten().tolist()}.pop()
        for name, half in state["model"].named_children()
    }


def buffers_of(state: Mapping[str, Any]) -> dict[str, float]:
    """Return the number that the optimizer's state of each half is made of."""
    buffers = state["optim"].state
    return {
        name: buffers[half.weight]["momentum_buffer"].max().item()
        for name, half in state["model"].named_children()
    }


@pytest.fixture
def places(tmp_path: Path) -> tuple[str, str]:
    """Return two checkpoints, of ones at step 1 and of twos at step 2."""
    for value, name in enumerate("ab", 1):
        dc.save(trained(value), tmp_path / name, step=value)
    return str(tmp_path / "a"), str(tmp_path / "b")


# --- what comes from where ----------------------------------------------------------------------


def test_each_key_of_a_mapping_has_its_source_and_the_report_says_which(places) -> None:
    a, b = places
    state = trained(9)
    report = dc.load(state, {"model": a, "optim": Path(b), "epoch": [a]})
    assert model_of(state) == {"encoder": 1, "head": 1}
    assert buffers_of(state) == {"encoder": 2, "head": 2}
    assert (state["epoch"], state["optim"].param_groups[0]["lr"]) == (1, 2)
    assert (report.path, report.step) == (a, 1)
    assert [(one.path, one.step) for one in report.sources] == [(a, 1), (b, 2)]
    first, second = ({name.partition(".")[0] for name in s.restored} for s in report.sources)
    assert (first, second) == ({"model", "epoch"}, {"optim"})
    assert str(report).startswith(f"loaded {a} and {b}: ")


def test_of_a_list_the_first_that_has_a_name_gives_it(places, tmp_path: Path) -> None:
    a, b = places
    state = {**trained(9), "further": None}
    dc.save({"epoch": 7, "further": {"x": torch.ones(2)}}, tmp_path / "c")
    dc.load(state, [tmp_path / "c", b, a])
    assert (state["epoch"], model_of(state)["head"], buffers_of(state)["head"]) == (7, 2, 2)
    assert state["further"]["x"].tolist() == [1, 1]


def test_an_empty_state_takes_what_the_keys_name(places) -> None:
    a, b = places
    state: dict[str, Any] = {}
    report = dc.load(state, {"model.encoder": a, "optim": b})
    assert {*state} == {"model", "optim"}
    assert {*state["model"]} == {"encoder.weight", "encoder.bias"}
    assert report.unexpected == report.missing == ()


@pytest.mark.parametrize("groups", [1, 2])
def test_a_module_and_its_optimizer_are_filled_in_parts(groups: int, tmp_path: Path) -> None:
    """Parameter groups go by their parameters: whose they were, and not which number."""
    one, two = trained(1, groups=groups), trained(2, groups=groups)
    two["optim"].param_groups[-1]["lr"] = one["optim"].param_groups[0]["lr"] = 5
    dc.save(one, tmp_path / "one")
    dc.save(two, tmp_path / "two")
    state = trained(9, groups=groups)
    mine = ["model.encoder", "optim.state.model.encoder"]
    dc.load(state, [dc.Source(tmp_path / "one", include=mine), tmp_path / "two"])
    assert model_of(state) == buffers_of(state) == {"encoder": 1, "head": 2}
    assert [group["lr"] for group in state["optim"].param_groups] == [2, 5][-groups:]


def halves(folder: Path) -> list[Path]:
    """Save each half of a model with an optimizer of its own, both with groups number 0."""
    places = []
    for value, half in enumerate(("encoder", "head"), 1):
        state = trained(value)
        part = getattr(state["model"], half)
        optim = torch.optim.SGD(part.parameters(), lr=value, momentum=0.5)
        for parameter in part.parameters():
            optim.state[parameter]["momentum_buffer"] = torch.full_like(parameter, value)
        dc.save({"model": {half: part}, "optim": optim}, folder / half)
        places.append(folder / half)
    return places


def test_groups_of_two_optimizers_come_back_by_their_parameters(tmp_path: Path) -> None:
    places = halves(tmp_path)
    state = trained(9, groups=2)
    del state["epoch"]
    dc.load(state, places[::-1])
    assert model_of(state) == buffers_of(state) == {"encoder": 1, "head": 2}
    assert [group["lr"] for group in state["optim"].param_groups] == [1, 2]


def test_many_groups_of_a_later_source_stand_behind_those_of_the_first(tmp_path: Path) -> None:
    weights = nn.ParameterList(torch.ones(1) for _ in range(13))

    def grouped(rates: Mapping[int, float]) -> torch.optim.Optimizer:
        groups = [{"params": [weights[number]], "lr": rate} for number, rate in rates.items()]
        return torch.optim.SGD(groups)

    rates = {number: float(number + 1) for number in range(13)}
    for name, own in (("a", {5: 6.0}), ("b", rates)):
        dc.save({"w": weights, "optim": grouped(own)}, tmp_path / name)
    sources: list[Any] = [dc.Source(tmp_path / "a", include="optim"), tmp_path / "b"]
    optim = grouped(dict.fromkeys(rates, 99.0))
    dc.load({"w": weights, "optim": optim}, sources)
    assert [group["lr"] for group in optim.param_groups] == [*rates.values()]
    whole: dict[str, Any] = {"w": weights, "optim": None}
    dc.load(whole, sources)
    found = [group["lr"] for group in whole["optim"]["param_groups"]]
    assert found == [6.0, *(rate for rate in rates.values() if rate != 6.0)]


def test_one_group_of_two_sources_must_agree(tmp_path: Path) -> None:
    first, second = halves(tmp_path)
    state = trained(9)
    del state["epoch"]
    with pytest.raises(dc.IncompatibleError, match="which differ in 'lr'") as caught:
        dc.load(state, [first, second])
    assert f"in optim.param_groups.0 in {first} and in" in str(caught.value)
    assert f"in {second}, which" in str(caught.value)
    assert model_of(state) == {"encoder": 9, "head": 9}


def test_what_an_optimizer_keeps_for_a_parameter_comes_from_one_source(tmp_path: Path) -> None:
    """Of two kinds of optimizers' state a mixture would be neither's."""
    dc.save({"model": (one := trained(1))["model"], "optim": one["optim"]}, tmp_path / "sgd")
    net = Net(2)
    adam = torch.optim.Adam(net.parameters())
    net.head(net.encoder(torch.ones(3))).sum().backward()
    adam.step()
    dc.save({"model": net, "optim": adam}, tmp_path / "adam")
    state: dict[str, Any] = {}
    dc.load(state, [tmp_path / "sgd", tmp_path / "adam"])
    assert {*state["optim"]["state"]["model.head.weight"]} == {"momentum_buffer"}


def test_a_name_hides_what_later_sources_have_above_and_below_it(tmp_path: Path) -> None:
    t = torch.ones(1)
    dc.save({"x": {"y": t}, "z": 1, "list": [t, t]}, tmp_path / "a")
    dc.save({"x": 5, "z": {"y": t, "v": t}, "list": [t * 2] * 3}, tmp_path / "b")
    state: dict[str, Any] = {}
    dc.load(state, [tmp_path / "a", tmp_path / "b"])
    assert (state["x"]["y"].item(), {*state["x"]}, state["z"]) == (1, {"y"}, 1)
    assert [one.item() for one in state["list"]] == [1, 1, 2]
    state = {}
    dc.load(state, [dc.Source(tmp_path / "a", include="list.1"), tmp_path / "b"])
    assert [one.item() for one in state["list"]] == [2, 1, 2]  # in their order


def test_one_checkpoint_may_be_several_sources_and_is_found_once(places, tmp_path: Path) -> None:
    latest = f"{tmp_path}@latest"
    state: dict[str, Any] = {"model": None, "ema": None}
    report = dc.load(state, {"model": latest, "ema": dc.Source(latest, rename={"model": "ema"})})
    assert {*state["ema"]} == {*state["model"]}
    assert state["ema"]["head.bias"].tolist() == [2, 2]
    assert [one.path for one in report.sources] == [places[1]]


def test_a_source_alone_takes_what_it_selects(places) -> None:
    a, _ = places
    state = {"net": Net(9)}
    dc.load(state, dc.Source(a, include="net.encoder", rename={"model": "net"}))
    assert model_of({"model": state["net"]}) == {"encoder": 1, "head": 9}
    state = {"model": Net(9)}
    dc.load(state, dc.Source(a, include="model"), exclude="*.encoder")  # both cut
    assert model_of(state) == {"encoder": 9, "head": 1}


def test_what_all_sources_leave_out_is_not_asked_for(places) -> None:
    a, b = places
    state = trained(9)
    encoder = dc.Source(a, include="model.encoder")
    report = dc.load(state, {"model": encoder, "optim": b, "epoch": b})
    assert (model_of(state), report.missing) == ({"encoder": 1, "head": 9}, ())
    with pytest.raises(dc.IncompatibleError, match=f"{b} lacks model.x"):
        dc.load(
            {"model": {"x": torch.ones(1)}}, {"model": [encoder, dc.Source(b, include="model.x")]}
        )


# --- other worlds -------------------------------------------------------------------------------


def rows(rank: int, world_size: int, value: float) -> dc.LocalShard:
    """Return a rank's rows of a tensor of 12 rows, numbered from a value on."""
    count = 12 // world_size
    whole = torch.arange(12.0).reshape(12, 1) + value
    first = rank * count
    return dc.LocalShard(whole[first : first + count].clone(), (12, 1), (first, 0))


def saved_by(storage: MemoryStorage, world_size: int, path: str, value: float) -> None:
    states = [
        {
            "w": {"x": rows(rank, world_size, value)},
            "rng": dc.PerRank(rank + value),
            "all": torch.full((5,), float(value)),
            f"only{rank}": {"deep": {"er": rank}},
        }
        for rank in range(world_size)
    ]
    save_on_threads(storage, states, path)


def asking(rank: int) -> dict[str, Any]:
    return {"w": {"x": rows(rank, 4, -99)}, "rng": dc.PerRank(None), "all": torch.zeros(5)}


@pytest.mark.parametrize("spread", [1, 4 << 20])
def test_sources_of_other_world_sizes_fill_sharded_states(
    spread: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values lie in files of other ranks, per-rank ones go by the world of their own source."""
    monkeypatch.setattr(channel, "MAX_EXCHANGE_NBYTES", spread)
    storage = MemoryStorage()
    saved_by(storage, 2, "/a", 100)
    saved_by(storage, 4, "/b", 200)
    states = [{**asking(rank), "only1": None} for rank in range(4)]
    sources = {"rng": "/b", "all": "/b", "w": "/a", "only1": ["/a", "/b"]}
    report = load_on_threads(storage, states, sources)  # type: ignore[arg-type]
    for rank, state in enumerate(states):
        assert torch.equal(state["w"]["x"].tensor, rows(rank, 4, 100).tensor)
        assert state["rng"].value == rank + 200
        assert state["all"].tolist() == [200] * 5
        assert state["only1"] == {"deep": {"er": 1}}
    assert report.resharded == ("w.x",)
    assert report.job_nbytes_read < 4 * 48 + 4 * 20  # what all want is read once
    other = [{"rng": dc.PerRank(None)} for _ in range(4)]
    outcomes = try_load_on_threads(lambda _: storage, other, {"rng": "/a"})  # type: ignore[arg-type]
    for error in errors_of(outcomes):
        assert "rng: saved in /a for the keys 0, 1" in str(error)


def test_the_problems_of_all_sources_and_ranks_come_before_the_first_byte() -> None:
    storage = MemoryStorage()
    saved_by(storage, 2, "/a", 100)
    saved_by(storage, 4, "/b", 200)
    states = [asking(rank) for rank in range(4)]
    states[1]["all"] = torch.zeros(7)
    states[2]["all"] = torch.zeros(5, dtype=torch.int64)
    states[3]["w"]["y"] = torch.zeros(1)
    sources = {"w": ["/a", "/b"], "rng": "/b", "all": "/b"}
    outcomes = try_load_on_threads(lambda _: storage, states, sources)  # type: ignore[arg-type]
    for error in errors_of(outcomes):
        assert isinstance(error, dc.IncompatibleError)
        for fact in (
            "/a and /b do not fit the state; nothing was changed",
            "all: saved with shape (5,) in /b, the state has (7,)",
            "all: saved as float32 in /b, the state has int64",
            "/a and /b lack w.y: remove it",
        ):
            assert fact in str(error)
    for rank, state in enumerate(states):
        assert torch.equal(state["w"]["x"].tensor, rows(rank, 4, -99).tensor)
        assert state["rng"].value is None


def test_ranks_must_give_a_key_the_same_source() -> None:
    storage = MemoryStorage()
    for path in ("/a", "/b"):
        save_on_threads(storage, [{"m": torch.ones(1), "n": torch.ones(1)}], path)
    state = {"m": torch.zeros(1), "n": torch.zeros(1)}
    given = [{"m": "/a", "n": "/b"}, {"n": "/a", "m": "/b"}]
    outcomes = try_ranks(
        lambda rank, channel, bulk: load_together(
            Session(channel, bulk, TEST_CONFIG), state, given[rank], LoadOptions(), storage
        ),
        world_size=2,
        harness="threads",
    )
    for error in errors_of(outcomes):
        assert "with different sources: rank 0: (('m', '/a'), ('n', '/b'))" in str(error)
    assert not state["m"].any()


# --- what is refused ----------------------------------------------------------------------------


def test_sources_that_contain_themselves_are_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    given: Any
    for given in (endless, {"model": endless}, ["base", endless]):
        with pytest.raises(TypeError, match="path is a list: pass a str"):
            dc.load({}, given)


def test_a_name_in_no_source_is_missing_and_says_where_it_was_looked_for(places) -> None:
    a, b = places
    state = {**trained(9), "lost": 3}
    with pytest.raises(dc.IncompatibleError, match=f"{a} and {b} lack lost: remove it"):
        dc.load(state, [a, b])
    with pytest.raises(dc.IncompatibleError, match="no source is given for 2 names: epoch, lost: "):
        dc.load(state, {"model": a, "optim": b})
    assert model_of(state) == {"encoder": 9, "head": 9}
    report = dc.load(state, {"model": a, "optim": b}, strict=False)
    assert (report.missing, state["lost"], state["epoch"]) == (("epoch", "lost"), 3, 9)


def test_what_the_state_does_not_ask_for_is_said_by_source(places) -> None:
    a, b = places
    sources = {"model": a, "optim": b}
    with pytest.raises(dc.IncompatibleError) as caught:
        dc.load({"model": {"head": Net(9).head}}, sources)
    text = str(caught.value)
    assert f"model.encoder.bias, which {a} holds" in text
    assert f"more, which {b} holds" in text
    assert "optim.param_groups.0" in text
    report = dc.load({"model": {"head": Net(9).head}}, sources, strict=False)
    assert "model.encoder.bias" in report.unexpected
    assert "epoch" not in report.unexpected  # it is at no key


def test_two_keys_may_not_give_one_name(places) -> None:
    a, b = places
    rest = {"optim": b, "epoch": b}
    with pytest.raises(
        dc.IncompatibleError,
        match=r"model\.head\.weight and 1 more: the sources of 'model' and of 'model.head' both",
    ):
        dc.load(trained(9), {"model": a, "model.head": b, **rest})
    state = trained(9)
    dc.load(state, {"model": dc.Source(a, exclude="*.head"), "model.head": b, **rest})
    assert model_of(state) == {"encoder": 1, "head": 2}


@pytest.mark.parametrize(
    ("sources", "error", "message"),
    [
        ([], ValueError, "the list of sources is empty: give"),
        ({}, ValueError, "an empty mapping: give"),
        ({"model": []}, ValueError, "the list of sources for 'model' is empty"),
        ({"": "{a}"}, ValueError, "the key ''"),
        ({"model.": "{a}"}, ValueError, "the key 'model.'"),
        ({1: "{a}"}, TypeError, "the key 1"),
        (["{a}", ["{b}"]], TypeError, "path is a list"),
        ({"model": {"encoder": "{a}"}}, TypeError, "path is a dict"),
        (["{a}", "{b}/../a"], ValueError, "a is given twice, and"),
        ({"model": ["{a}", "{a}"]}, ValueError, "a is given twice for 'model'"),
        (["{a}", "{a}-no", "{b}-no"], dc.NotFoundError, "a-no: no checkpoint.*b-no: no checkp"),
        (["{a}", "{b}/no@latest"], dc.NotFoundError, "b/no does not exist"),
        ({"modle": "{a}"}, dc.IncompatibleError, "modle: nothing is saved under this key in "),
        (dc.Source("{a}", include=3), TypeError, "include=3"),  # type: ignore[arg-type]
        ([dc.Source("{a}", exclude=""), "{b}"], ValueError, "empty pattern"),
        ([dc.Source("{a}", rename={"a": "*"}), "{b}"], ValueError, "the same number of"),
        ([dc.Source("{a}", include="no"), "{b}"], dc.IncompatibleError, "a: include: 'no' mat"),
        ([dc.Source("{a}", exclude="no"), "{b}"], dc.IncompatibleError, "a: exclude: 'no' mat"),
        (
            [dc.Source("{a}", rename={"no": "x"}), "{b}"],
            dc.IncompatibleError,
            "a: rename: 'no' matches no saved name",
        ),
        (dc.Source(dc.Source("{a}")), TypeError, "path is a Source"),  # type: ignore[arg-type]
    ],
)
def test_what_makes_no_sense_is_refused_and_nothing_changes(
    sources: Any, error: type[Exception], message: str, places
) -> None:
    def placed(one: Any) -> Any:
        if isinstance(one, str):
            return one.replace("{a}", places[0]).replace("{b}", places[1])
        if isinstance(one, dc.Source):
            return dc.Source(placed(one.path), one.include, one.exclude, one.rename)
        if isinstance(one, dict):
            return {key: placed(value) for key, value in one.items()}
        return [placed(item) for item in one]

    state = trained(9)
    with pytest.raises(error, match=message) as caught:
        dc.load(state, placed(sources))
    assert type(caught.value) is error
    assert (model_of(state), state["epoch"]) == ({"encoder": 9, "head": 9}, 9)


def test_a_rename_of_the_load_itself_is_for_one_source(places) -> None:
    a, b = places
    for sources in ([a, b], dc.Source(a, rename={"model": "net"})):
        with pytest.raises(ValueError, match=r"give each dc\.Source its own"):
            dc.load({"net": Net(9)}, sources, rename={"model": "net"})


def test_a_pattern_of_the_load_itself_matches_in_one_source_at_least(places, tmp_path) -> None:
    dc.save({"extra": 1}, tmp_path / "c")
    state = {**trained(9), "extra": 0}
    dc.load(state, [tmp_path / "c", *places], include=["extra", "epoch"])
    assert (state["extra"], state["epoch"], model_of(state)["head"]) == (1, 1, 9)
    with pytest.raises(dc.IncompatibleError, match="'nothing' matches no name"):
        dc.load(state, [*places], include=["model", "nothing"])


class Scheduler:
    def __init__(self) -> None:
        self.state: dict[str, Any] = {"a": torch.ones(1), "b": torch.ones(1)}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def test_an_object_comes_from_one_source_or_not_at_all(tmp_path: Path) -> None:
    for name in "xy":
        dc.save({"s": Scheduler()}, tmp_path / name)
    x, y = (str(tmp_path / name) for name in "xy")
    with pytest.raises(dc.IncompatibleError, match=f"saved in {x}, and another in {y}: exclude it"):
        dc.load({"s": Scheduler()}, [dc.Source(x, include="s.a"), y])
    with pytest.raises(dc.IncompatibleError, match=r"'s\.b' is left out: exclude all of it"):
        dc.load({"s": Scheduler()}, {"s": dc.Source(x, include="s.a")})
    dc.load({"s": Scheduler()}, [dc.Source(x, include="s"), y])


def test_tied_tensors_of_two_sources_must_be_equal(tmp_path: Path) -> None:
    w = torch.ones(2)
    for name, value in {"x": w, "y": w, "z": -w}.items():
        dc.save({"a": value, "b": value}, tmp_path / name)
    w.zero_()
    dc.load({"a": w, "b": w}, {"a": tmp_path / "x", "b": tmp_path / "y"})
    assert w.tolist() == [1, 1]
    with pytest.raises(dc.IncompatibleError, match=r"^[ab] and [ab] share memory"):
        dc.load({"a": w, "b": w}, {"a": tmp_path / "x", "b": tmp_path / "z"})


def test_state_that_the_source_of_the_state_does_not_know_is_missing(tmp_path: Path) -> None:
    """The groups of another source say nothing of what this one was saved with."""
    a, b = (tmp_path / name for name in "ab")
    dc.save({"optim": {"state": {}}, "model": Net(1)}, a)
    dc.save(trained(2), b)
    state = trained(9)
    sources = {"optim.state": a, "optim.param_groups": b, "model": b, "epoch": b}
    with pytest.raises(dc.IncompatibleError, match=r"lacks 4 names: optim\.state\.model\.encoder"):
        dc.load(state, sources)
    assert buffers_of(state) == {"encoder": 9, "head": 9}


# --- under fire ---------------------------------------------------------------------------------


@pytest.mark.parametrize("check_first", [False, True])
def test_damage_names_the_file_of_its_source_and_what_was_touched(
    check_first: bool, places
) -> None:
    a, b = places
    (shards,) = Path(b).rglob("optim*.safetensors")
    data = bytearray(shards.read_bytes())
    data[-1] ^= 1
    shards.write_bytes(data)
    state = trained(9)
    with pytest.raises(dc.CorruptError, match=re.escape(str(shards))) as caught:
        dc.load(state, {"model": a, "optim": b, "epoch": a}, check_first=check_first)
    assert "source 1" not in str(caught.value)
    assert all(not name.startswith("source") for name in caught.value.touched)
    if check_first:
        assert caught.value.touched == ()
        assert (model_of(state), buffers_of(state)["head"]) == ({"encoder": 9, "head": 9}, 9)
    dc.load(state, {"model": a, "optim": a, "epoch": b})  # what is damaged is not asked for


def test_a_source_that_is_replaced_as_it_is_read_is_found_anew(places, monkeypatch) -> None:
    a, b = places

    def prepare_late(*arguments: Any) -> Any:
        monkeypatch.undo()
        dc.save(trained(3), b, overwrite=True, step=3)
        return real(*arguments)

    real = check_load
    monkeypatch.setattr(loading, "check_load", prepare_late)
    state = trained(9)
    report = dc.load(state, {"model": a, "optim": b, "epoch": b})
    assert (model_of(state)["head"], buffers_of(state)["head"], state["epoch"]) == (1, 3, 3)
    assert [one.step for one in report.sources] == [1, 3]


def test_all_that_selectors_name_is_held_and_a_part_is_no_check(
    tmp_path: Path, monkeypatch
) -> None:
    roots = [tmp_path / name for name in ("one", "two")]
    for root in roots:
        dc.save(trained(1), root / "s1", step=1)
        dc.Run(root).metrics(1, {"loss": 1.0})
    seen: list[int] = []

    def fill(*arguments: Any) -> Any:
        seen.extend(len(dc.Run(root).find(1).leases) for root in roots)
        return real(*arguments)

    real = loading._read_and_place
    monkeypatch.setattr(loading, "_read_and_place", fill)
    one, two = (f"{root}@min:loss" for root in roots)
    dc.load(trained(9), {"model": one, "optim": two, "epoch": two})
    assert seen == [1, 1]
    for root in roots:
        found = dc.Run(root).find(1)
        assert (found.leases, found.is_verified) == ((), False)
    dc.load(trained(9), dc.Source(one, exclude="model"))
    assert not dc.Run(roots[0]).find(1).is_verified
    dc.load(trained(9), dc.Source(one))
    assert dc.Run(roots[0]).find(1).is_verified


def test_what_was_found_is_let_go_if_another_source_is_not(tmp_path: Path) -> None:
    dc.save({"x": 1}, tmp_path / "s1", step=1)
    run = dc.Run(tmp_path)
    run.metrics(1, {"loss": 1.0})
    with pytest.raises(dc.NotFoundError):
        dc.load({"x": 1}, [f"{tmp_path}@latest", tmp_path / "no"])
    assert run.find(1).leases == ()


def test_a_load_from_several_opens_each_index_once(places, monkeypatch) -> None:
    a, b = places
    opened: list[str] = []
    real = LocalStorage.open

    def noted(self: LocalStorage, path: str) -> Any:
        opened.append(path)
        return real(self, path)

    monkeypatch.setattr(LocalStorage, "open", noted)
    dc.load(trained(9), {"model": a, "optim": b, "epoch": [a, b]})
    names = [path.rpartition("/")[2] for path in opened]
    assert names.count("index.json") == names.count("objects.msgpack") == 2
