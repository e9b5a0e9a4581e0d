from __future__ import annotations

from typing import Any

import pytest

from dist_ckpt.core.planning.name_selection import parse_selection


def selected(names: str, **options: Any) -> list[str]:
    selection = parse_selection(options.get("include"), options.get("exclude"))
    return [name for name in names.split() if name in selection]


NAMES = "model.a.weight model.a.bias optim.state.a.bias.exp_avg modelx step"


def test_without_patterns_everything_is_selected() -> None:
    assert selected(NAMES) == NAMES.split()


def test_a_name_selects_all_below_it_and_nothing_that_only_begins_alike() -> None:
    assert selected(NAMES, include="model") == ["model.a.weight", "model.a.bias"]
    assert selected(NAMES, include=["model.*"]) == ["model.a.weight", "model.a.bias"]


def test_a_pattern_selects_what_is_stored_under_a_name() -> None:
    assert selected(NAMES, exclude="*.bias") == ["model.a.weight", "modelx", "step"]


def test_exclude_wins_over_include() -> None:
    assert selected(NAMES, include="model", exclude="model.a.bias") == ["model.a.weight"]


@pytest.mark.parametrize(
    ("option", "error"),
    [([], ValueError), ([3], TypeError), ([""], ValueError), (iter(["a"]), TypeError)],
)
def test_patterns_that_make_no_sense_are_refused(option: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="include"):
        parse_selection(option, None)
