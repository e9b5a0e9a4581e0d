"""Objects with `state_dict` inside what another object's `state_dict` returns."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

from dist_ckpt.core.state.wrappers import RNG, Named, PerRank
from dist_ckpt.errors import IncompatibleError
from in_memory import load, save


class Inner:
    def __init__(self, value: Any = 0) -> None:
        self.value = value
        self.num_loads = 0

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]
        self.num_loads += 1


class Outer:
    """Returns its attributes as they are, as torch's schedulers do."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.loaded = dict(state)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


def test_an_object_inside_another_one_is_loaded_and_stays_the_live_object() -> None:
    source = Outer(inner=Inner(5), more=[Inner(1), {"a": Inner(2)}, (Inner(3),)], n=7)
    inner = Inner()
    more: list[Any] = [Inner(), {"a": Inner()}, (Inner(),)]
    target: Any = Outer(inner=inner, more=more, n=0)
    load(save({"o": source}), {"o": target})
    assert target.inner is inner
    assert [inner.value, target.n] == [5, 7]
    live: Any = target.more
    assert live[0] is more[0]
    assert [live[0].value, live[1]["a"].value, live[2][0].value] == [1, 2, 3]
    assert type(live[2]) is tuple


@pytest.mark.parametrize("name", ["a", "z"])  # before and after the outer object's name
def test_an_inner_object_is_loaded_before_the_outer_one_and_once(name: str) -> None:
    inner = Inner()
    seen: list[Any] = []

    class Watching(Outer):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            seen.append(state["inner"].value)

    saved = save({"o": Outer(inner=Inner(5)), name: Inner(5)})
    load(saved, {"o": Watching(inner=inner), name: inner})
    assert (seen, inner.value, inner.num_loads) == ([5], 5, 1)


def test_the_tensors_of_an_inner_object_are_filled_in_place() -> None:
    source = Outer(inner=Inner(torch.arange(3.0)), new=Inner({"t": torch.ones(2)}))
    tensor, new = torch.zeros(3), Inner(None)
    target: Any = Outer(inner=Inner(tensor), new=new)
    load(save({"o": source}), {"o": target})
    assert target.inner.value is tensor
    assert tensor.tolist() == [0, 1, 2]
    assert new.value["t"].tolist() == [1, 1]


def test_what_was_saved_in_the_place_of_an_object_is_given_as_it_is() -> None:
    target: Any = Outer(inner=Inner(3), other=Inner(4))
    load(save({"o": Outer(inner=None, other=False)}), {"o": target})
    assert target.loaded == {"inner": None, "other": False}


def test_a_dict_that_was_saved_in_the_place_of_an_object_is_loaded_into_it() -> None:
    inner = Inner()
    target: Any = Outer(inner=inner)
    for saved in ({"value": 4}, {"value": torch.ones(1)}):
        load(save({"o": Outer(inner=saved, n=1)}), {"o": target})
        assert target.inner is inner
        assert inner.value == saved["value"]
        assert target.loaded == {"inner": inner, "n": 1}


def test_an_inner_value_of_each_rank_comes_back_by_its_key() -> None:
    def state(rank: int, inner: Inner, value: int) -> dict[str, Any]:
        return {"o": Outer(inner=PerRank(inner), own=PerRank(value), rng=RNG())}

    saved = save(*(state(rank, Inner(rank), 10 + rank) for rank in range(2)))
    inner = Inner()
    target: Any = state(1, inner, 0)
    keys = dict.fromkeys(("o.inner", "o.own", "o.rng"), (0, 1))
    load(saved, target, rank=1, world_size=2, keys=keys)
    assert target["o"].inner is inner
    assert [inner.value, inner.num_loads, target["o"].own] == [1, 1, 11]
    assert isinstance(target["o"].rng, RNG)


def test_an_inner_object_of_each_rank_needs_an_object_that_loads_it() -> None:
    saved = save({"o": Outer(inner=PerRank(Inner(5)), n=1)})
    refuses(saved, {"o": Outer(n=0)}, "o.inner: saved by the state_dict of an object")


def test_an_inner_value_that_a_reshard_drops_keeps_its_value() -> None:
    saved = save(*({"o": Outer(own=PerRank(r), n=1)} for r in range(2)))
    target: Any = Outer(own=PerRank(5, on_reshard="drop"), n=0)
    load(saved, {"o": target})
    assert target.loaded == {"own": 5, "n": 1}


def training(lr: float = 0.1) -> tuple[nn.Linear, torch.optim.Optimizer]:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    return model, optimizer


@pytest.mark.parametrize("name", ["optim", "zoptim", None])
def test_a_module_and_an_optimizer_inside_an_object_stay_the_live_ones(name: str | None) -> None:
    model, optimizer = training()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    names = {"w": model.weight, "b": model.bias}
    outside: dict[str, Any] = {name: Named(optimizer, names)} if name else {}
    saved = save({"o": Outer(ema=model, optim=Named(optimizer, names)), **outside})

    fresh, new = training(lr=0.5)
    names = {"w": fresh.weight, "b": fresh.bias}
    named = Named(new, names)
    target: Any = Outer(ema=fresh, optim=named)
    load(saved, {"o": target, **({name: Named(new, names)} if name else {})})
    assert target.ema is fresh
    assert target.optim is named
    assert torch.equal(fresh.weight, model.weight)
    assert new.param_groups[0]["lr"] == 0.1
    for live, old in zip(fresh.parameters(), model.parameters(), strict=True):
        buffers = new.state[live]["momentum_buffer"], optimizer.state[old]["momentum_buffer"]
        assert torch.equal(*buffers)


@pytest.mark.parametrize("name", ["m", "z"])  # before and after the outer object's name
def test_a_module_inside_an_object_and_outside_of_it_is_loaded_once(name: str) -> None:
    class Counting(nn.Linear):
        num_loads = 0

        def load_state_dict(self, *args: Any, **options: Any) -> Any:
            self.num_loads += 1
            return super().load_state_dict(*args, **options)

    source, target = Counting(1, 1), Counting(1, 1)
    holder: Any = Outer(ema=target)
    load(save({"o": Outer(ema=source), name: source}), {"o": holder, name: target})
    assert holder.ema is target
    assert torch.equal(target.weight, source.weight)
    assert target.num_loads == 1


class Projector:
    """The shape of GaLore's projector, with the `state_dict` that the error of a save advises."""

    def __init__(self) -> None:
        self.matrix: torch.Tensor | None = None
        self.num_updates = 0

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class Projecting(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in (p for group in self.param_groups for p in group["params"]):
            state = self.state[parameter]
            projector = state.setdefault("projector", Projector())
            projector.matrix = parameter.detach() * 2
            projector.num_updates += 1


def test_an_object_in_the_state_of_an_optimizer_stays_the_live_object() -> None:
    def state() -> dict[str, Any]:
        model = nn.Linear(2, 2)
        return {"m": model, "o": Projecting(model.parameters(), lr=0.1)}

    source, target = state(), state()
    for _ in range(2):
        source["o"].step()
    target["o"].step()
    live = target["o"].state[target["m"].weight]["projector"]
    load(save(source), target)
    assert target["o"].state[target["m"].weight]["projector"] is live
    assert live.num_updates == 2
    assert torch.equal(live.matrix, source["m"].weight * 2)


def test_an_object_in_the_extra_state_of_a_module_stays_the_live_object() -> None:
    class WithExtra(nn.Linear):
        def __init__(self, inner: Inner) -> None:
            super().__init__(1, 1)
            self.inner: Any = inner

        def get_extra_state(self) -> Any:
            return OrderedDict(inner=self.inner)

        def set_extra_state(self, state: Any) -> None:
            self.inner = state["inner"]

    inner = Inner()
    target = WithExtra(inner)
    load(save({"m": WithExtra(Inner(3))}), {"m": target})
    assert target.inner is inner
    assert inner.value == 3


class Warmup(torch.optim.lr_scheduler.LRScheduler):
    """The shape of warm-up wrappers: `state_dict` of torch returns the inner scheduler itself."""

    def __init__(self, optimizer: Any, after: Any) -> None:
        self.after = after
        super().__init__(optimizer)

    def get_lr(self) -> Any:
        return [group["lr"] for group in self.optimizer.param_groups]

    def step(self, epoch: Any = None) -> None:
        if self.last_epoch < 2:
            super().step(epoch)
        else:
            self.after.step()


@pytest.mark.parametrize("is_in_state", [False, True])
def test_a_scheduler_inside_a_warmup_continues_as_in_an_uninterrupted_run(
    is_in_state: bool,
) -> None:
    def state() -> dict[str, Any]:
        _, optimizer = training(lr=1.0)
        after = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        inner = {"after": after} if is_in_state else {}
        names = ["weight", "bias"]
        return {"optim": Named(optimizer, names), "warmup": Warmup(optimizer, after), **inner}

    def run(state: dict[str, Any], steps: int) -> list[float]:
        rates = []
        for _ in range(steps):
            state["optim"].optimizer.step()
            state["warmup"].step()
            rates.append(state["optim"].optimizer.param_groups[0]["lr"])
        return rates

    source, target = state(), state()
    run(source, 5)
    load(save(source), target)
    assert target["warmup"].after.optimizer is target["optim"].optimizer
    expected = run(source, 6)
    assert run(target, 6) == expected
    assert len({*expected}) > 1


def test_an_inner_object_of_an_excluded_one_is_not_loaded() -> None:
    inner = Inner()
    load(save({"o": Outer(inner=Inner(5)), "n": 1}), {"o": Outer(inner=inner), "n": 0}, exclude="o")
    assert inner.num_loads == 0
    with pytest.raises(IncompatibleError, match=r"'o\.inner' is left out: exclude all of it"):
        load(save({"o": Outer(inner=Inner(5), n=1)}), {"o": Outer(inner=inner)}, exclude="o.inner")


# --- an object that the state does not have --------------------------------------------------


def refuses(saved: Any, state: Any, *texts: str, **options: Any) -> None:
    with pytest.raises(IncompatibleError) as caught:
        load(saved, state, **options)
    for text in texts:
        assert text in str(caught.value)


def test_an_inner_object_that_is_not_there_is_refused_before_anything_is_touched() -> None:
    saved = save({"o": Outer(inner=Inner(Inner(torch.ones(1)))), "w": torch.ones(2)})
    for target in (Outer(inner=None), Outer(), Outer(inner={}), Outer(inner=3)):
        w = torch.zeros(2)
        text = (
            "o.inner: saved by the state_dict of an object, and the state has no object there that "
            "could load it: make it before the load, so that state_dict() of Outer returns it, or "
            "exclude 'o'"
        )
        refuses(saved, {"o": target, "w": w}, text)
        refuses(saved, {"o": target, "w": w}, text, strict=False)
        assert w.tolist() == [0, 0]
        load(saved, {"o": target, "w": w}, exclude="o")
        assert w.tolist() == [1, 1]


def test_an_object_that_a_list_lacks_is_refused_by_its_name() -> None:
    saved = save({"o": Outer(more=[Inner(1), Inner(2)], ema=nn.Linear(1, 1))})
    refuses(saved, {"o": Outer(more=[Inner()], ema=nn.Linear(1, 1))}, "o.more.1: saved by")
    refuses(saved, {"o": Outer(more=[Inner(), Inner()], ema=None)}, "o.ema: saved by")
    shorter = save({"o": Outer(more=[Inner(1)])})
    target: Any = Outer(more=[Inner(), Inner()])
    load(shorter, {"o": target})
    assert [len(target.more), target.more[0].value] == [1, 1]


def test_an_inner_object_whose_dict_the_state_has_now_is_given_as_a_dict() -> None:
    target: Any = Outer(inner={"value": 0})
    load(save({"o": Outer(inner=Inner(5))}), {"o": target})
    assert target.loaded == {"inner": {"value": 5}}


def test_an_object_that_the_state_of_a_new_optimizer_lacks_is_refused_with_the_way() -> None:
    def state() -> dict[str, Any]:
        model = nn.Linear(2, 2)
        return {"m": model, "o": Projecting(model.parameters(), lr=0.1)}

    source = state()
    source["o"].step()
    saved = save(source)
    refuses(
        saved,
        state(),
        "o.state.m.bias.projector, o.state.m.weight.projector: saved by the state_dict of an "
        "object",
        "by one step with gradients of zero",
    )
    target = state()
    load(saved, target, exclude="*.projector")
    assert torch.equal(target["m"].weight, source["m"].weight)
    assert not target["o"].state[target["m"].weight]


def test_a_renamed_object_is_still_known_as_one() -> None:
    saved = save({"o": Outer(inner=Inner(5), n=1)})
    refuses(saved, {"p": Outer(inner=None)}, "p.inner: saved by", rename={"o.*": "p.*"})


def test_without_a_state_everything_is_loaded_as_plain_data() -> None:
    saved = save({"o": Outer(inner=Inner(5), n=torch.ones(1))})
    states: list[dict[str, Any]] = [{}, {"o": None}, {"o": {}}]
    for state in states:
        load(saved, state)
        assert state["o"] == {"inner": {"value": 5}, "n": torch.ones(1)}


def test_a_checkpoint_that_does_not_name_its_objects_is_loaded_as_before() -> None:
    saved = save({"o": Outer(inner=Inner(5))})
    saved.forget_objects()
    target: Any = Outer(inner=None)
    load(saved, {"o": target})
    assert target.inner == {"value": 5}
