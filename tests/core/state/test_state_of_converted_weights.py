"""State of an optimizer whose parameter is converted: refused, unless its value is the same."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dist_ckpt as dc
from dist_ckpt.errors import IncompatibleError
from dist_ckpt.interop import imports

STATE = "optim.state.model.0.weight"


class First(nn.Module):
    def __init__(self, rows: int = 3) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, 3))
        self.bias = nn.Parameter(torch.randn(3))


class Second(First):
    """A class that converts the state of its first version by `convert`."""

    _version = 2

    def __init__(self, convert: Callable[[torch.Tensor], torch.Tensor], rows: int = 3) -> None:
        super().__init__(rows)
        self.convert = convert

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *args: Any) -> None:
        if metadata.get("version", 1) < 2:
            state[f"{prefix}weight"] = self.convert(state[f"{prefix}weight"])
        super()._load_from_state_dict(state, prefix, metadata, *args)


class ByData(Second):
    """A class that reads the weight before it converts."""

    def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
        state[f"{prefix}weight"].sum().item()
        super()._load_from_state_dict(state, prefix, *args)


class ByHand(Second):
    """A class that loads its weight itself."""

    def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
        super(Second, self)._load_from_state_dict(state, prefix, *args)
        self.weight.data = self.convert(state[f"{prefix}weight"])


class Swapped(First):
    """A class that has swapped the names of two weights."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Parameter(torch.randn(3, 3))

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *args: Any) -> None:
        if metadata.get("version", 1) < 2:
            a, b = f"{prefix}weight", f"{prefix}other"
            state[a], state[b] = state[b], state[a]
        super()._load_from_state_dict(state, prefix, metadata, *args)


class OldSwapped(Swapped):
    _version = 1


def first_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(1, dtype=torch.long, device=weight.device), weight[1:2]


CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": torch.t,
    "transposed and copied": lambda weight: weight.t().clone(),
    "copied and negated": lambda weight: -weight.clone(),
    "negated in place": lambda weight: weight.neg_(),
    "an overwritten part": lambda weight: weight.clone().index_copy_(0, *first_rows(weight)),
    "an overwritten view": lambda weight: weight[0].zero_().new_zeros(3, 3).copy_(weight),
    "other rows": lambda weight: weight.roll(1, 0),
}
NO_CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "itself": lambda weight: weight,
    "copied": torch.clone,
    "in another dtype": lambda weight: weight.double().contiguous().detach(),
    "filled": lambda weight: torch.empty_like(weight).copy_(weight),
    "transposed twice": lambda weight: weight.t().t(),
}


def stepped(*modules: nn.Module, cls: Any = torch.optim.Adam, **options: Any) -> dict[str, Any]:
    """Return a model and an optimizer that has made a step."""
    state = fresh(*modules, cls=cls, **options)
    for parameter in state["model"].parameters():
        parameter.grad = torch.rand_like(parameter)
    state["optim"].step()
    return state


def fresh(*modules: nn.Module, cls: Any = torch.optim.Adam, **options: Any) -> dict[str, Any]:
    model = nn.Sequential(*modules)
    return {"model": model, "optim": cls(model.parameters(), lr=0.1, **options)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("saved") / "first"
    dc.save(stepped(First()), path)
    return path


def refusal(path: Path, state: dict[str, Any], **options: Any) -> str:
    """Return the text of a refusal that has touched nothing."""
    before = deepcopy(state["model"].state_dict())
    moments = deepcopy(state["optim"].state_dict())
    with pytest.raises(IncompatibleError) as caught:
        dc.load(state, path, **options)
    assert_equal(state["model"].state_dict(), before)
    assert_equal(state["optim"].state_dict(), moments)
    return str(caught.value).partition("  - ")[2]


def assert_equal(left: Any, right: Any) -> None:
    torch.testing.assert_close(left, right, rtol=0, atol=0)


TEXT = (
    f"{STATE}: model.0.weight is converted by its class while it is loaded, and its optimizer "
    f"state keeps the saved form, which has another meaning: exclude {STATE} to begin without, "
    f"or convert the state too, such as rename={{'{STATE}.exp_avg': [dc.Transpose(), "
    f"'{STATE}.exp_avg']}}"
)


@pytest.mark.parametrize(
    ("cls", "change"), [(ByHand, "transposed"), *((Second, change) for change in CHANGES)]
)
def test_state_of_a_converted_parameter_is_refused(cls: Any, change: str, saved: Path) -> None:
    state = fresh(cls(CHANGES[change]))
    assert refusal(saved, state) == TEXT
    report = dc.load(state, saved, exclude=STATE)
    assert [*state["optim"].state] == [state["model"][0].bias]
    assert "model.0.weight" in report.restored


@pytest.mark.parametrize(
    ("cls", "change"), [(ByHand, "itself"), *((Second, change) for change in NO_CHANGES)]
)
def test_state_of_a_parameter_that_keeps_its_value_is_loaded(
    cls: Any, change: str, saved: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state, expected = fresh(cls(NO_CHANGES[change])), fresh(First())
    dc.load(state, saved)
    dc.load(expected, saved)
    assert_equal(state["optim"].state_dict(), expected["optim"].state_dict())
    assert not caplog.records


@pytest.mark.parametrize("exclude", ["model", "model.0.bias"])
@pytest.mark.parametrize("strict", [True, False])
def test_a_weight_that_is_not_loaded_counts_too(
    exclude: str, strict: bool, saved: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert refusal(saved, fresh(Second(torch.t)), exclude=exclude, strict=strict) == TEXT
    dc.load(fresh(Second(torch.clone)), saved, exclude=exclude, strict=strict)
    assert not caplog.records


def test_state_of_a_sharded_weight_that_is_not_loaded_gives_a_warning(
    saved: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sharding = dc.ShardingConfig({"tp": 1}, {"*.weight": {"tp": 0}})
    dc.load(fresh(Second(torch.t)), saved, exclude="model", sharding=sharding)
    assert f"{STATE}, optim.state.model.0.bias: the class of the model may" in caplog.text


def test_state_that_the_user_converts_is_loaded(saved: Path) -> None:
    moments = [f"{STATE}.exp_avg", f"{STATE}.exp_avg_sq"]
    rename = {name: [dc.Transpose(), name] for name in moments}
    state, expected = fresh(Second(torch.t)), fresh(First())
    dc.load(state, saved, rename=rename)
    dc.load(expected, saved)
    for name, value in expected["optim"].state[expected["model"][0].weight].items():
        now = state["optim"].state[state["model"][0].weight][name]
        assert_equal(now, value if name == "step" else value.t())
    assert STATE in refusal(saved, fresh(Second(torch.t)), rename=dict([*rename.items()][:1]))


def test_state_of_the_shape_of_the_old_weight_is_refused_before_an_optimizer_has_any(
    tmp_path: Path,
) -> None:
    dc.save(stepped(First(3)), tmp_path / "c")
    assert STATE in refusal(tmp_path / "c", fresh(Second(lambda w: w[:2], rows=2)))


def test_swapped_weights_have_each_others_state(tmp_path: Path) -> None:
    dc.save(stepped(OldSwapped()), tmp_path / "c")
    text = refusal(tmp_path / "c", fresh(Swapped()))
    assert text.startswith(f"{STATE}, optim.state.model.0.other: model.0.weight is converted")
    dc.load(fresh(OldSwapped()), tmp_path / "c")


def test_a_class_that_converts_only_data_gives_a_warning_if_its_values_differ(
    saved: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dc.load(fresh(ByData(torch.clone)), saved)
    dc.load(fresh(ByData(torch.t)), saved, exclude=STATE)
    assert not caplog.records
    dc.load(fresh(ByData(torch.t)), saved)
    dc.load(fresh(ByData(torch.t)), saved, exclude="model")
    names = [record.getMessage().partition(": the class of the ")[0] for record in caplog.records]
    assert names == [STATE, f"{STATE}, optim.state.model.0.bias"]


def test_a_name_that_a_conversion_needs_is_known_before_the_load(saved: Path) -> None:
    text = refusal(saved, fresh(Second(torch.clone)), exclude="model.0.weight")
    assert text.startswith("model: the module cannot convert the saved state: model: load_state")
    assert "raised KeyError ('0.weight')" in text


@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.Adagrad])
def test_state_without_values_of_elements_is_loaded(cls: Any, tmp_path: Path) -> None:
    dc.save(stepped(First(), cls=cls), tmp_path / "c")
    if cls is torch.optim.SGD:
        dc.load(fresh(Second(torch.t), cls=cls), tmp_path / "c")
    else:
        assert STATE in refusal(tmp_path / "c", fresh(Second(torch.t), cls=cls))


def test_a_tied_weight_and_one_with_another_layer_are_judged_alone(tmp_path: Path) -> None:
    def tied(layer: nn.Module) -> tuple[nn.Module, nn.Module]:
        other = nn.Linear(3, 3)
        other.weight = layer.weight  # type: ignore[assignment]
        return layer, other

    dc.save(stepped(*tied(First())), tmp_path / "c")
    dc.load(fresh(*tied(Second(torch.clone))), tmp_path / "c")
    dc.save(stepped(nn.Linear(3, 3), First()), tmp_path / "two")
    text = refusal(tmp_path / "two", fresh(nn.Linear(3, 3), Second(torch.t)))
    assert text.startswith("optim.state.model.1.weight: ")


def test_state_that_torch_has_by_number_is_refused_too(tmp_path: Path) -> None:
    source = stepped(First())
    torch.save({n: o.state_dict() for n, o in source.items()}, tmp_path / "c.pt")  # noqa: TID251
    imports.from_torch(tmp_path / "c.pt", tmp_path / "c")
    assert refusal(tmp_path / "c", fresh(Second(torch.t))).startswith("optim.state.0: model.0.we")
    dc.load(fresh(Second(torch.clone)), tmp_path / "c")


class Old(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.ModuleDict({"linear_1": nn.Linear(3, 3), "linear_2": nn.Linear(3, 3)})


class New(nn.Module):
    """A block whose parts have other names than in its first version, as torchvision's MLPBlock."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *args: Any) -> None:
        for old, new in (("linear_1", "0"), ("linear_2", "2")):
            for kind in ("weight", "bias") if metadata.get("version", 1) < 2 else ():
                if (key := f"{prefix}mlp.{old}.{kind}") in state:
                    state[f"{prefix}mlp.{new}.{kind}"] = state.pop(key)
        super()._load_from_state_dict(state, prefix, metadata, *args)


def new_norm() -> Any:
    return nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))


def old_norm() -> Any:
    return nn.utils.weight_norm(nn.Linear(3, 3))


PARTS = "parametrizations.weight.original"
OLD_TO_NEW = {
    f"*.{layer}.weight_{name}": f"*.{layer}.{PARTS}{number}"
    for layer in (0, 1)
    for name, number in (("g", 0), ("v", 1))
}


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
@pytest.mark.parametrize(
    ("before", "after", "rules"),
    [
        (Old, New, {"*.mlp.linear_1": "*.mlp.0", "*.mlp.linear_2": "*.mlp.2"}),
        (old_norm, new_norm, OLD_TO_NEW),
        (new_norm, old_norm, {new: old for old, new in OLD_TO_NEW.items()}),
    ],
)
def test_state_of_renamed_parameters_is_loaded_with_the_rename_that_the_error_prints(
    before: Any, after: Any, rules: dict[str, str], tmp_path: Path
) -> None:
    source, state = stepped(before(), before()), fresh(after(), after())
    dc.save(source, tmp_path / "c")
    text = refusal(tmp_path / "c", state)
    assert text.startswith("the checkpoint has other names for ")
    assert text.endswith(f": load with rename={rules!r}")
    dc.load(state, tmp_path / "c", rename=rules)
    assert_equal(state["optim"].state_dict()["state"], source["optim"].state_dict()["state"])
    x = torch.randn(2, 3)
    if after is not New:
        assert_equal(state["model"](x), source["model"](x))
    if before is not new_norm:
        dc.load(fresh(after(), after()), tmp_path / "c", exclude="optim")
    else:
        assert refusal(tmp_path / "c", state, exclude="optim").endswith(f"rename={rules!r}")
