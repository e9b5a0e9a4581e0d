"""The front doors keep explicit keywords with defaults: those of the classes of their options."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from types import SimpleNamespace
from typing import Any

import pytest

import dist_ckpt as dc
from dist_ckpt.async_save.async_saver import SaverOptions
from dist_ckpt.checkpointer.checkpointer_options import RunOptions
from dist_ckpt.core.loading import load
from dist_ckpt.core.loading.load_options import LoadOptions
from dist_ckpt.core.saving import save
from dist_ckpt.core.saving.save_options import SaveOptions
from dist_ckpt.tools.average import average
from dist_ckpt.tools.average.checkpoint_selection import AverageOptions

# The options that only dist_ckpt itself gives.
OF_RUNS = {"incarnation", "boundary", "is_urgent", "make_room"}


@dataclass(frozen=True)
class Door:
    """A public function, its classes of options, its other parameters, and hidden options."""

    function: Callable[..., Any]
    options: tuple[type[Any], ...]
    others: frozenset[str]
    hidden: frozenset[str] = frozenset()

    @property
    def parameters(self) -> dict[str, inspect.Parameter]:
        """The parameters that are options, by name."""
        parameters = inspect.signature(self.function).parameters
        return {name: one for name, one in parameters.items() if name not in self.others}

    @property
    def defaults(self) -> dict[str, object]:
        """The defaults of the public options; MISSING for an option that must be given."""
        every = [one for options in self.options for one in fields(options)]
        return {one.name: one.default for one in every if one.name not in self.hidden}


SAVE = Door(dc.save, (SaveOptions,), frozenset({"state", "path", "group"}), frozenset(OF_RUNS))
BACKGROUND_SAVE = Door(
    dc.AsyncSaver.save,
    (SaveOptions,),
    frozenset({"self", "state", "path"}),
    frozenset({*OF_RUNS, "carry_over"}),
)
LOAD = Door(
    dc.load,
    (LoadOptions,),
    frozenset({"state", "path", "group", "opener"}),
    frozenset({"record_check"}),
)
RESTORE = Door(
    dc.AsyncSaver.restore,
    (LoadOptions,),
    frozenset({"self", "state"}),
    frozenset({"verify", "check_first", "read_once", "cast", "dequantize", "record_check"}),
)
AVERAGE = Door(dc.average, (AverageOptions,), frozenset({"sources", "to", "group", "progress"}))
SAVER = Door(dc.AsyncSaver.__init__, (SaverOptions,), frozenset({"self", "group"}))
RUN = Door(dc.Checkpointer.__init__, (RunOptions,), frozenset({"self", "group"}))


@pytest.mark.parametrize("door", [SAVE, BACKGROUND_SAVE, LOAD, RESTORE, AVERAGE, SAVER, RUN])
def test_the_keywords_of_a_front_door_are_the_options_with_their_defaults(door: Door) -> None:
    defaults = door.defaults
    assert door.parameters.keys() == defaults.keys()
    for name, parameter in door.parameters.items():
        is_first = name == next(iter(door.parameters)) == "root"
        assert is_first or parameter.kind is parameter.KEYWORD_ONLY
        if defaults[name] is not MISSING:
            assert parameter.default == defaults[name], name


def values_of(door: Door) -> dict[str, object]:
    """Return a value of its own for each option."""
    return {name: f"the {name}" for name in door.parameters}


def handed_on(options: object, door: Door) -> dict[str, object]:
    """Return the options that have arrived, by name."""
    return {name: getattr(options, name) for name in door.parameters}


def test_every_front_door_hands_each_option_on_under_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arrived: list[Any] = []

    def take(*arguments: object, **_: object) -> None:
        arrived.extend(one for one in arguments if isinstance(one, SaveOptions | LoadOptions))
        arrived.extend(one.options for one in arguments if isinstance(one, average.AverageCall))

    for module in (save, load, average):
        monkeypatch.setattr(module, "session_of", lambda _: None)
    monkeypatch.setattr(save, "save_together", take)
    monkeypatch.setattr(load, "load_together", take)
    monkeypatch.setattr(average, "average_together", take)
    saver: Any = SimpleNamespace(save_with=take, restore_with=take)
    calls: list[tuple[Door, tuple[Any, ...], dict[str, Any]]] = [
        (SAVE, ({}, "path"), {}),
        (BACKGROUND_SAVE, (saver, {}, "path"), {}),
        (LOAD, ({}, "path"), {}),
        (RESTORE, (saver, {}), {}),
        (AVERAGE, (["a", "b"],), {"to": "path"}),
    ]
    for door, arguments, others in calls:
        arrived.clear()
        door.function(*arguments, **others, **values_of(door))
        (options,) = arrived
        assert handed_on(options, door) == values_of(door)
