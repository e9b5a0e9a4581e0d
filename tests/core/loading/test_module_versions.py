"""Classes with a `_version` load as by torch: what they convert, and what they leave."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import dist_ckpt as dc
from dist_ckpt.core.planning.module_versions import (
    encode_metadata,
    join_versions,
    merge_versions,
    versions_of_names,
)
from dist_ckpt.core.planning.save import inventories
from dist_ckpt.core.state.binding.conversions.conversion_decision import decide_conversion
from dist_ckpt.core.state.module_tensors import Converter
from dist_ckpt.interop import imports
from dist_ckpt.interop.torch_save.export import export_file

Model = Callable[[], Any]


class First(nn.Module):
    """The first version of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, 3))
        self.register_buffer("offset", torch.randn(3))


class Second(First):
    """The second version: its weight is stored transposed."""

    _version = 2

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *args: Any) -> None:
        if metadata.get("version", 0) < 2 and f"{prefix}w" in state:
            state[f"{prefix}w"] = state[f"{prefix}w"].t().clone()
        super()._load_from_state_dict(state, prefix, metadata, *args)


class OtherShape(nn.Module):
    """A version with another shape, and one more buffer."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(9))
        self.register_buffer("offset", torch.randn(3))
        self.register_buffer("scale", torch.ones(2))

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *args: Any) -> None:
        if metadata.get("version", 1) < 2:
            state[f"{prefix}w"] = state[f"{prefix}w"].reshape(9)
            state[f"{prefix}scale"] = torch.full((2,), 7.0)
        super()._load_from_state_dict(state, prefix, metadata, *args)


class Root(First):
    """A root that converts in its own `load_state_dict`."""

    _version = 2

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        if state._metadata[""]["version"] < 2:
            state = OrderedDict(state, w=state["w"].t().clone())
        return super().load_state_dict(state, strict=strict, assign=assign)


class Renamed(nn.Module):
    """A layer with a hook that renames its old state."""

    def __init__(self) -> None:
        super().__init__()
        self.new = nn.Linear(3, 3)
        self._register_load_state_dict_pre_hook(self._rename)

    def _rename(self, state: Any, prefix: str, *args: Any) -> None:
        for key in [key for key in state if key.startswith(f"{prefix}old.")]:
            state[key.replace("old.", "new.")] = state.pop(key)


class Old(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.old = nn.Linear(3, 3)


class OldBatchNorm(nn.BatchNorm1d):
    _version = 1

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        del destination[f"{prefix}num_batches_tracked"]


class Tied(nn.Module):
    def __init__(self, cls: Model) -> None:
        super().__init__()
        self.a, self.b = cls(), cls()
        self.b.w = self.a.w


class Shared(nn.Module):
    def __init__(self, cls: Model) -> None:
        super().__init__()
        self.a = self.b = cls()


class Extra(First):
    """Extra state beside a hook that needs a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.register_load_state_dict_pre_hook(lambda _, state, prefix, *args: state[f"{prefix}w"])

    def get_extra_state(self) -> Any:
        return {"count": self.count}

    def set_extra_state(self, state: Any) -> None:
        self.count = state["count"]


def spectral() -> nn.Module:
    return nn.Sequential(nn.utils.spectral_norm(nn.Linear(3, 3)))


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
def old_weight_norm() -> nn.Module:
    return nn.utils.weight_norm(nn.Linear(3, 3))


def in_model(cls: Model) -> Model:
    return lambda: nn.Sequential(cls(), nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 3))


def with_hook(make: Model) -> Model:
    def build() -> nn.Module:
        model: nn.Module = make()
        model.register_load_state_dict_post_hook(lambda module, keys: None)
        return model

    return build


# What is saved, and what it is loaded into.
PAIRS: dict[str, tuple[Model, Model]] = {
    "the same": (in_model(Second), in_model(Second)),
    "the same, with a hook": (in_model(Second), with_hook(in_model(Second))),
    "a hook on the layer": (in_model(Second), in_model(with_hook(Second))),
    "older": (in_model(First), in_model(Second)),
    "older, with a hook": (in_model(First), with_hook(in_model(Second))),
    "older, the root itself": (First, Second),
    "another shape": (in_model(First), in_model(OtherShape)),
    "a root of the same version": (Root, Root),
    "a root of an older version": (First, Root),
    "renamed by a hook": (Old, Renamed),
    "renamed below": (lambda: nn.ModuleDict({"a": Old()}), lambda: nn.ModuleDict({"a": Renamed()})),
    "a BatchNorm without a count": (
        in_model(lambda: OldBatchNorm(3)),
        in_model(lambda: nn.BatchNorm1d(3)),
    ),
    "weight_norm, parametrized": (
        old_weight_norm,
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)),
    ),
    "spectral_norm": (spectral, spectral),
    "spectral_norm with a hook": (spectral, with_hook(spectral)),
    "tied": (lambda: Tied(Second), lambda: Tied(Second)),
    "tied, older": (lambda: Tied(First), lambda: Tied(Second)),
    "one module twice": (lambda: Shared(First), lambda: Shared(Second)),
    "extra state beside a hook": (Extra, Extra),
    "torch's own": (
        lambda: nn.TransformerEncoderLayer(4, 2, 4),
        lambda: nn.TransformerEncoderLayer(4, 2, 4),
    ),
    "instance norm": (
        lambda: nn.InstanceNorm1d(3, track_running_stats=True),
        lambda: nn.InstanceNorm1d(3, track_running_stats=True),
    ),
}


def assert_equal(left: nn.Module, right: nn.Module) -> None:
    a, b = left.state_dict(), right.state_dict()
    assert a.keys() == b.keys()
    for key in a:
        is_equal = (
            torch.equal(a[key], b[key]) if isinstance(a[key], torch.Tensor) else a[key] == b[key]
        )
        assert is_equal, key


def torch_load(path: Path) -> Any:
    return torch.load(path)  # noqa: TID251 - the way to compare with


def torchs_way(saved: nn.Module, target: nn.Module, folder: Path) -> nn.Module:
    """Return a copy of the target that has loaded a file of torch.save."""
    torch.save(saved.state_dict(), folder / "file.pt")  # noqa: TID251 - the way to compare with
    expected = deepcopy(target)
    is_meta = any(tensor.is_meta for tensor in (*expected.parameters(), *expected.buffers()))
    expected.load_state_dict(
        torch_load(folder / "file.pt"), **({"assign": True} if is_meta else {})
    )
    return expected


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
def test_a_load_equals_torchs_own(pair: str, device: str, tmp_path: Path) -> None:
    saved, target = (make() for make in PAIRS[pair])
    if device == "meta" and pair in ("spectral_norm", "spectral_norm with a hook"):
        pytest.skip("spectral_norm computes a vector")
    target = target.to(device)
    expected = torchs_way(saved, target, tmp_path)
    dc.save({"model": saved}, tmp_path / "step")
    parameters = [*target.parameters()]
    report = dc.load({"model": target}, tmp_path / "step")
    assert_equal(target, expected)
    assert report.missing == report.unexpected == report.assumed == ()
    assert device == "meta" or all(map(lambda a, b: a is b, target.parameters(), parameters))


@pytest.mark.parametrize("pair", ["the same, with a hook", "older", "another shape", "tied, older"])
@pytest.mark.parametrize("has_trained", [False, True])
def test_a_load_that_swaps_parameters_equals_torchs_own(
    pair: str, has_trained: bool, tmp_path: Path
) -> None:
    saved, target = (make() for make in PAIRS[pair])
    if has_trained:
        sum(parameter.square().sum() for parameter in target.parameters()).backward()
    expected = torchs_way(saved, target, tmp_path)
    dc.save({"model": saved}, tmp_path / "step")
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        dc.load({"model": target}, tmp_path / "step")
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert_equal(target, expected)


@pytest.mark.parametrize("cls", [First, Second])
@pytest.mark.parametrize(
    "what", ["the module", "its state dict", "bytes", "an export", "an import"]
)
def test_a_state_dict_gets_its_versions_back(cls: Model, what: str, tmp_path: Path) -> None:
    saved = in_model(cls)()
    expected = torchs_way(saved, in_model(Second)(), tmp_path)
    step = tmp_path / "step"
    dc.save({"model": saved.state_dict() if what == "a state dict" else saved}, step)
    if what == "bytes":
        state = dc.from_bytes(dc.to_bytes({"model": saved}))
    elif what == "an export":
        export_file(step, tmp_path / "model.pt")
        state = torch_load(tmp_path / "model.pt")
    else:
        if what == "an import":
            imports.from_torch(tmp_path / "file.pt", step := tmp_path / "imported")
        dc.load(state := {}, step)
    assert dict(state["model"]._metadata) == dict(saved.state_dict()._metadata)
    other = in_model(Second)()
    other.load_state_dict(state["model"])
    assert_equal(other, expected)


@pytest.mark.parametrize("empty", [dict, OrderedDict])
def test_an_empty_dict_in_the_state_is_filled(empty: Any, tmp_path: Path) -> None:
    saved = in_model(First)()
    dc.save({"model": saved, "n": 1}, tmp_path / "step")
    weights = empty()
    dc.load(state := {"model": weights, "n": 0}, tmp_path / "step")
    assert weights.keys() == saved.state_dict().keys()
    assert state["model"]._metadata["0"] == {"version": 1}
    assert empty is dict or state["model"] is weights


def test_a_live_state_dict_gets_the_versions_of_what_it_loads(tmp_path: Path) -> None:
    saved, target = in_model(First)(), in_model(Second)()
    dc.save({"model": saved}, tmp_path / "step")
    state = {"model": deepcopy(target.state_dict())}
    dc.load(state, tmp_path / "step", include=["model.0.*"])
    assert state["model"]._metadata["0"] == {"version": 1}
    expected = deepcopy(target)
    expected[0].load_state_dict(saved[0].state_dict())
    target.load_state_dict(state["model"])
    assert_equal(target, expected)
    dc.load(
        {"model": (live := deepcopy(target.state_dict()))}, tmp_path / "step", include=["model.3.*"]
    )
    assert live._metadata["0"] == {"version": 2}


def test_a_plain_dict_without_versions_is_converted_as_by_torch(tmp_path: Path) -> None:
    saved, target = in_model(Second)(), in_model(Second)()
    expected = deepcopy(target)
    expected.load_state_dict(plain := dict(saved.state_dict()))
    dc.save({"model": plain}, tmp_path / "step")
    dc.load({"model": target}, tmp_path / "step")
    assert_equal(target, expected)
    live = {"model": deepcopy(target.state_dict())}
    dc.load(live, tmp_path / "step")
    assert live["model"]._metadata == {"2": {"version": 1}}  # without tensors


def test_a_root_dict_that_cannot_have_versions_is_said(tmp_path: Path) -> None:
    dc.save(Second().state_dict(), tmp_path / "step")
    (assumed,) = dc.load({}, tmp_path / "step").assumed
    assert "cannot have the saved versions" in assumed
    state: Any = OrderedDict()
    assert dc.load(state, tmp_path / "step").assumed == ()
    assert state._metadata == {"": {"version": 2}}


@pytest.mark.parametrize("wrap", [checkpoint_wrapper, lambda m: torch.compile(m, backend="eager")])
def test_wrappers_do_not_hide_a_version(wrap: Any, tmp_path: Path) -> None:
    saved, target = in_model(First)(), in_model(Second)()
    expected = torchs_way(saved, target, tmp_path)
    saved[0] = wrap(saved[0])
    dc.save({"model": wrap(saved)}, tmp_path / "step")
    inner = target[0]
    target[0] = wrap(inner)
    dc.load({"model": wrap(target)}, tmp_path / "step")
    target[0] = inner
    assert_equal(target, expected)


def test_a_missing_name_is_an_error_before_anything_changes(tmp_path: Path) -> None:
    class More(Second):
        def __init__(self) -> None:
            super().__init__()
            self.more = nn.Parameter(torch.ones(2))

    dc.save({"model": nn.Sequential(First())}, tmp_path / "step")
    target = nn.Sequential(More())
    before = deepcopy(target)
    with pytest.raises(dc.IncompatibleError, match=r"lacks model\.0\.more"):
        dc.load({"model": target}, tmp_path / "step")
    assert_equal(target, before)
    report = dc.load({"model": target}, tmp_path / "step", strict=False)
    assert report.missing == ("model.0.more",)


def test_a_tensor_that_a_conversion_leaves_out_is_unexpected(tmp_path: Path) -> None:
    older = First()
    older.more = nn.Parameter(torch.ones(2))
    dc.save({"model": older}, tmp_path / "step")
    with pytest.raises(dc.IncompatibleError, match=r"the state does not have model\.more"):
        dc.load({"model": Second()}, tmp_path / "step")
    report = dc.load({"model": (target := Second())}, tmp_path / "step", strict=False)
    assert report.unexpected == ("model.more",)
    assert torch.equal(target.w, older.w.t())


def test_a_hook_renames_what_it_can_in_a_load_that_is_not_strict(tmp_path: Path) -> None:
    older = Old()
    older.more = nn.Parameter(torch.ones(2))
    dc.save({"model": older}, tmp_path / "step")
    report = dc.load({"model": (target := Renamed())}, tmp_path / "step", strict=False)
    assert report.unexpected == ("model.more",)
    assert torch.equal(target.new.weight, older.old.weight)


def test_an_excluded_module_is_not_converted(tmp_path: Path) -> None:
    dc.save({"model": in_model(First)()}, tmp_path / "step")
    target = with_hook(in_model(Second))()
    before = deepcopy(target[0])
    dc.load({"model": target}, tmp_path / "step", exclude=["model.0"])
    assert_equal(target[0], before)


def test_an_excluded_module_keeps_its_values_beside_one_that_converts(tmp_path: Path) -> None:
    dc.save({"model": nn.Sequential(First(), First())}, tmp_path / "step")
    target = with_hook(lambda: nn.Sequential(Second(), Second()))()
    before = deepcopy(target)
    dc.load({"model": target}, tmp_path / "step", exclude=["model.0"])
    assert_equal(target[0], before[0])
    assert not torch.equal(target[1].w, before[1].w)


class Noting(Second):
    """Notes the conversion in the metadata that it gets."""

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *args: Any) -> None:
        super()._load_from_state_dict(state, prefix, metadata, *args)
        metadata["version"] = 2


def test_a_class_may_write_into_the_metadata(tmp_path: Path) -> None:
    dc.save({"model": nn.Sequential(saved := First())}, tmp_path / "step")
    dc.load({"model": nn.Sequential(layer := Noting())}, tmp_path / "step")
    assert torch.equal(layer.w, saved.w.t())


class Loads(First):
    """Counts the calls that load its state."""

    loads = 0

    def _load_from_state_dict(self, *args: Any) -> None:
        self.loads += 1
        super()._load_from_state_dict(*args)


def test_a_tied_name_that_was_not_saved_is_no_reason_to_convert(tmp_path: Path) -> None:
    dc.save({"model": Tied(First)}, tmp_path / "step", exclude="model.b.w")
    target = Tied(Loads)
    dc.load({"model": target}, tmp_path / "step")
    assert target.a.loads == target.b.loads == 0


def test_a_rename_moves_the_versions(tmp_path: Path) -> None:
    saved, target = in_model(First)(), in_model(Second)()
    expected = torchs_way(saved, target, tmp_path)
    dc.save({"net": {"body": saved.state_dict()}}, tmp_path / "step")
    dc.load({"model": target}, tmp_path / "step", rename={"net.body.*": "model.*"})
    assert_equal(target, expected)
    newer = in_model(Second)()
    dc.save({"old": {"0": newer[0].state_dict()}}, tmp_path / "newer")
    dc.load({"model": target[:1]}, tmp_path / "newer", rename={"old.*": "model.*"})
    assert_equal(target[0], newer[0])


def test_the_first_source_of_a_module_has_its_version(tmp_path: Path) -> None:
    old, new = First(), Second()
    dc.save({"model": old}, a := tmp_path / "a")
    dc.save({"model": new}, b := tmp_path / "b")
    dc.load({"model": (target := Second())}, [dc.Source(a, include="*.w"), b])
    assert torch.equal(target.w, old.w.t())
    dc.load({"model": target}, [dc.Source(b, include="*.w"), a])
    assert torch.equal(target.w, new.w)


@pytest.mark.parametrize("cls", [First, Second])
def test_operations_move_the_versions_too(cls: Any, tmp_path: Path) -> None:
    saved = cls()
    dc.save({"model": nn.Sequential(saved)}, tmp_path / "a")
    rename: dict[Any, Any] = {"model.0.w": [dc.Transpose(), "model.w"]}
    rename["model.0.offset"] = [dc.Concatenate(), "model.offset"]
    live = Second()
    report = dc.load({"model": live}, tmp_path / "a", rename=rename)
    wanted = saved.w.t() if cls is Second else saved.w  # the class converts what the rule has made
    assert torch.equal(live.w, wanted)
    assert not report.assumed
    export_file(tmp_path / "a", tmp_path / "a.pt", rename=rename)
    live.load_state_dict(torch_load(tmp_path / "a.pt")["model"])
    assert torch.equal(live.w, wanted)


def test_a_module_made_of_others_has_the_present_version(tmp_path: Path) -> None:
    q, k, o = torch.randn(1, 3), torch.randn(2, 3), torch.randn(1, 3)
    dc.save({"net": nn.ParameterDict({"q": q, "k": k, "o": o})}, tmp_path / "a")
    rename: dict[Any, Any] = {("net.q", "net.k"): [dc.Concatenate(), "model.w"]}
    live = Second()
    report = dc.load({"model": live}, tmp_path / "a", rename=rename, exclude=["model.o*", "net.*"])
    assert torch.equal(live.w, torch.cat([q, k]))
    assert "has no versions of these modules" in report.assumed[0]


def test_a_newer_version_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    dc.save({"model": (saved := Second())}, tmp_path / "step")

    class Code(Second):
        _version = 1

    dc.load({"model": (target := Code())}, tmp_path / "step")
    assert "saved by version 2" in caplog.text
    assert_equal(target, saved)


def test_an_older_checkpoint_counts_as_the_present_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inventories, "merge_module_versions", lambda distinct: None)
    dc.save({"model": (saved := Second()), "version": "older"}, tmp_path / "step")
    target = with_hook(Second)()
    (assumed,) = dc.load({"model": target, "version": ""}, tmp_path / "step").assumed
    assert "has no versions of these modules" in assumed
    assert_equal(target, saved)


def test_an_error_of_a_conversion_names_what_may_have_changed(tmp_path: Path) -> None:
    class Broken(Second):
        def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
            raise ValueError("no")

    dc.save({"model": nn.Sequential(First(), nn.Linear(2, 2))}, tmp_path / "step")
    with pytest.raises(dc.CheckpointError, match="raised ValueError") as caught:
        dc.load({"model": nn.Sequential(Broken(), nn.Linear(2, 2))}, tmp_path / "step")
    assert caught.value.touched == ("model.0.offset", "model.0.w")


def test_a_rule_that_cuts_a_converted_tensor_is_an_error(tmp_path: Path) -> None:
    dc.save({"model": nn.Sequential(First())}, tmp_path / "step")
    target = nn.Sequential(Second())
    before = deepcopy(target)
    sharding = dc.ShardingConfig(mesh={"tp": 1}, rules={"*.w": {"tp": 0}})
    with pytest.raises(dc.IncompatibleError, match="before it is sharded"):
        dc.load({"model": target}, tmp_path / "step", sharding=sharding)
    assert_equal(target, before)


def body_and_head(cls: Model) -> Any:
    return nn.ModuleDict({"body": cls(), "head": cls()})


@pytest.mark.parametrize("how", ["include", "exclude"])
def test_a_carried_module_is_converted_though_its_class_is_newer(how: str, tmp_path: Path) -> None:
    old, new, last = body_and_head(First), body_and_head(Second), body_and_head(Second)
    dc.save({"model": old}, tmp_path / "a")
    options: dict[str, Any] = {"include": "model.body.*"}
    report = dc.load({"model": new}, tmp_path / "a", **options)
    if how == "exclude":  # the state has no head at all, but the names stay
        del new["head"]
        options = {}
    dc.save({"model": new}, tmp_path / "b", carry_over=report, **options)
    for checkpoint in ("a", "b"):
        dc.load({"model": last}, tmp_path / checkpoint)
        for layer in ("body", "head"):
            assert torch.equal(last[layer].w, old[layer].w.t())
            assert torch.equal(last[layer].offset, old[layer].offset)


def test_parts_of_two_versions_of_one_module_are_refused(tmp_path: Path) -> None:
    dc.save({"model": body_and_head(First)}, tmp_path / "a")
    new = {"model": body_and_head(Second)}
    report = dc.load(new, tmp_path / "a", include="model.*.offset")
    message = r"carry_over: model\.body has version 2, and version 1 in the loaded checkpoint"
    with pytest.raises(ValueError, match=message):
        dc.save(new, tmp_path / "b", carry_over=report, include="model.*.offset")
    assert not (tmp_path / "b" / "index.json").exists()
    dc.save(new, tmp_path / "b")


# --- the decisions alone -----------------------------------------------------------------------

OWN, BY_NAMES = Converter("C"), Converter("C", by_names=True)
ROOT = Converter("C", overrides_load=True)


@pytest.mark.parametrize(
    ("converter", "before", "now", "names", "expected"),
    [
        (OWN, 1, 2, "", {"staged": {"a"}}),
        (OWN, 2, 1, "", {"staged": {"a"}, "newer": ("a",)}),
        (OWN, 1, 2, "cut", {"refused": ("a",)}),
        (OWN, 2, 1, "cut", {"newer": ("a",)}),
        # Without metadata the first version is assumed.
        (OWN, None, 1, "", {"staged": {"a"}}),
        (OWN, None, 1, "cut", {}),
        (OWN, None, 2, "cut", {"refused": ("a",)}),
        (ROOT, None, 1, "", {}),
        (ROOT, None, 2, "", {"staged": {"a"}}),
        (BY_NAMES, 1, 2, "mismatches", {"renaming": {"a"}}),
        (BY_NAMES, 1, 2, "mismatches cut", {}),
    ],
)
def test_what_a_module_converts(
    converter: Converter, before: int | None, now: int, names: str, expected: Any
) -> None:
    saved: Any = {} if before is None else {"version": before}
    decision = decide_conversion(
        {"a": converter},
        {"a": {"version": now}},
        lambda path: saved,
        mismatches=["a.w"] if "mismatches" in names else [],
        cut=["a.w"] if "cut" in names else [],
    )
    kinds: dict[str, Any] = {"staged": set(), "renaming": set()}
    kinds |= {"refused": (), "newer": (), "unknown": ()}
    assert {name: getattr(decision, name) for name in kinds} == {**kinds, **expected}


def test_versions_of_ranks_and_of_checkpoints_are_joined() -> None:
    low, high = ("m", '{"": 1, "a": 1}'), ("m", '{"": 1, "a": 3}')
    assert merge_versions([low, high]) == merge_versions([high, low]) == {"m": {"": 1, "a": 3}}
    both = {"m": {"": 2}, "n": {"": 3}}
    assert join_versions({"m": {"": 2}}, {"n": {"": 3}}, ["m.w"], ["n.w"]) == both
    with pytest.raises(ValueError, match="carry_over: m has version 2, and version 1 in"):
        join_versions({"m": {"": 2}}, {"m": {"": 1}}, ["m.a"], ["m.b"])
    assert versions_of_names({"": {"": 2}, "m": {"": 2}}, ["w"]) == {"": {"": 2}}
    # `load_state_dict(assign=True)` adds an entry to the metadata that it gets.
    assert encode_metadata({"version": 2, "assign_to_params_buffers": True}) == 2
