from __future__ import annotations

from typing import Any

import pytest

from dist_ckpt.binding.selection import rename_of, selection_of


def selected(names: str, **options: Any) -> list[str]:
    selection = selection_of(options.get("include"), options.get("exclude"))
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
    ("option", "error"), [([], ValueError), ([3], TypeError), ([""], ValueError)]
)
def test_patterns_that_make_no_sense_are_refused(option: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="include"):
        selection_of(option, None)


def renamed(rules: dict[str, str | None], *names: str) -> tuple[dict[str, str | None], Any]:
    return rename_of(rules).of_all(names)


def test_the_text_of_a_star_goes_to_the_star_of_the_target() -> None:
    found, problems = renamed(
        {"encoder.*": "model.backbone.*", "*.gamma": "*.weight", "h.*.x.*": "*.y.*"},
        *("encoder.a.b", "norm.gamma", "h.0.x.w", "other"),
    )
    assert not problems
    assert list(found.values()) == ["model.backbone.a.b", "norm.weight", "0.y.w", "other"]


def test_a_rule_moves_what_is_below_a_name_and_none_drops_it() -> None:
    found, problems = renamed({"a.b": "c", "d": None}, "a.b", "a.b.x.y", "a.bb", "d.x", "dd")
    assert not problems
    assert list(found.values()) == ["c", "c.x.y", "a.bb", None, "dd"]


def test_rules_that_disagree_about_a_name_are_a_problem() -> None:
    _, problems = renamed({"a.*": "b.*", "*.w": "*.weight"}, "a.w", "a.x", "c.w")
    (problem,) = problems
    assert "'a.w' is matched by ['*.w', 'a.*'], which disagree" in problem


def test_two_names_that_would_become_one_are_a_problem() -> None:
    _, problems = renamed({"a.*": "b.*"}, "a.w", "b.w")
    (problem,) = problems
    assert "'a.w' and 'b.w' would both be 'b.w'" in problem


def test_a_rule_that_matches_nothing_is_a_problem() -> None:
    _, problems = renamed({"enc.*": "b.*"}, "encoder.w")
    assert problems == ("rename: 'enc.*' matches no saved name: mend or remove the rule",)


@pytest.mark.parametrize(
    ("rules", "error"),
    [
        ({"a.*": "b"}, ValueError),
        ({"a": "b.*"}, ValueError),
        ({"a?": "b"}, ValueError),
        ({"": "b"}, ValueError),
        ({"a": ""}, ValueError),
        ({"a": 3}, TypeError),
        ({3: "a"}, TypeError),
    ],
)
def test_rules_that_make_no_sense_are_refused(rules: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="rename has"):
        rename_of(rules)
