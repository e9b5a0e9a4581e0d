"""What `rename` makes of saved names, and what it says of rules that make no sense."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_ckpt.core.state.binding.sources.rename import parse_rename, suggest_rules
from long_mode import examples


def renamed(rules: dict[str, str | None], *names: str) -> tuple[dict[str, str | None], Any]:
    return parse_rename(rules).apply(names)


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
    assert problems == ("rename: 'enc.*' matches no saved name: change or remove the rule",)


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
        ({"a[0]": "b"}, ValueError),
        ({"a.{}": "b"}, ValueError),
        ({"a.{0}": "b.{0}"}, ValueError),
        ({"a.{i": "b"}, ValueError),
        ({"a.i}": "b"}, ValueError),
        ({"a.{i}.{i}": "b.{i}"}, ValueError),
        ({"a.{i}": "b.{j}"}, ValueError),
        ({"a.{i}*": "b.{i}*"}, ValueError),
        ({"a.{i}{j}": "b.{i}{j}"}, ValueError),
        ({"a.*": "b.{i}"}, ValueError),
    ],
)
def test_rules_that_make_no_sense_are_refused(rules: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="rename has"):
        parse_rename(rules)


# --- the wildcards ------------------------------------------------------------------------------


def one(pattern: str, target: str | None, name: str) -> str | None:
    found, _ = renamed({pattern: target}, name)
    return found[name]


@pytest.mark.parametrize(
    ("pattern", "target", "name", "expected"),
    [
        ("a.**", "b.**", "a.x.y", "b.x.y"),
        ("a.**", "b.*", "a.x.y", "b.x.y"),
        ("**.gamma", "**.weight", "a.b.gamma", "a.b.weight"),
        (
            "layers.{i}.attn.*",
            "blocks.{i}.self_attn.*",
            "layers.3.attn.q.w",
            "blocks.3.self_attn.q.w",
        ),
        ("{a}.{b}.w", "{b}.{a}.w", "x.y.w", "y.x.w"),  # in another order
        ("net{i}.w", "nets.{i}.w{i}", "net7.w", "nets.7.w7"),  # twice, and within a part
        ("{a}.{b}.w", "{b}.w", "x.y.w", "y.w"),  # or not at all
        ("{a}.w", "v.{a}", "x.y.w", "x.y.w"),  # no dots in it
        ("h.{i}.w", "g.{i}.w", "h..w", "h..w"),  # and no nothing
        ("h.{i}", "g.{i}", "h.0.w.x", "g.0.w.x"),  # what is below goes along
        ("h.{i}.x", None, "h.0.x.y", None),
        ("*", "model.*", "a.b", "model.a.b"),
        ("model.*", "*", "model.a.b", "a.b"),
        ("*.{i}.w", "*-{i}", "a.b.0.w", "a.b-0"),
        ("*.layers.{i}.w", "*/{i}", "a.layers.b.c.layers.0.w", "a.layers.b.c/0"),
        ("*a*", "*<*", "banana", "b<nana"),  # the first takes the shorter one
        ("{x}-{y}", "{y}-{x}", "a-b-c", "b-c-a"),
        ("a.b+(c)|$", "d", "a.b+(c)|$", "d"),  # nothing else is a wildcard
        ("a.*", "b.*", "a.x\ny", "b.x\ny"),
    ],
)
def test_wildcards(pattern: str, target: str | None, name: str, expected: str | None) -> None:
    assert one(pattern, target, name) == expected


def plainly(pattern: str, name: str) -> bool:
    """Say whether a name matches, by an expression that goes back as often as it has to."""
    texts = {"*": "(.*)", "{i}": "([^.]+)", "{j}": "([^.]+)"}
    parts = re.split(r"(\*|\{.\})", pattern)
    regex = "".join(texts.get(part, re.escape(part)) for part in parts)
    above = ["".join(name[:cut]) for cut in range(1, len(name) + 1) if name[cut:][:1] in ("", ".")]
    return any(re.fullmatch(regex, one, re.DOTALL) for one in above)


TEXT = st.text("ab.", min_size=1, max_size=3)
WILDCARD = st.sampled_from(["*", "{i}", "{j}"])


@st.composite
def patterns(draw: Any) -> str:
    tokens = [draw(TEXT)] if draw(st.booleans()) else []
    for wildcard in draw(
        st.lists(WILDCARD, max_size=4).filter(lambda w: w.count("{i}") < 2 > w.count("{j}"))
    ):
        tokens += [wildcard, draw(TEXT)]
    return "".join(tokens[: len(tokens) - draw(st.booleans())]) or "a"


@examples()
@given(patterns(), st.text("ab.", min_size=1, max_size=12))
def test_a_match_is_found_if_there_is_one_though_nothing_is_tried_twice(
    pattern: str, name: str
) -> None:
    found, problems = renamed({pattern: None}, name)
    assert (found[name] is None) == plainly(pattern, name)
    assert (not problems) == plainly(pattern, name)


@pytest.mark.parametrize(
    "pattern",
    ["*a" * 20 + "b", "{a0}" + "".join(f"a{{a{i}}}" for i in range(1, 20)) + "b", "*a{i}a*a{j}a*b"],
)
def test_no_pattern_takes_long(pattern: str) -> None:
    # As plain expressions these would take longer than anybody has.
    start = time.thread_time()
    assert one(pattern, None, "a" * 4096) == "a" * 4096
    assert time.thread_time() - start < 10


# --- rules that meet ----------------------------------------------------------------------------


def test_rules_look_at_saved_names_only() -> None:
    found, problems = renamed({"a.*": "b.*", "b.*": "c.*"}, "a.w", "b.w")
    assert (found, problems) == ({"a.w": "b.w", "b.w": "c.w"}, ())
    found, problems = renamed({"a": "b", "b": "a"}, "a.w", "b.w")
    assert (found, problems) == ({"a.w": "b.w", "b.w": "a.w"}, ())


def test_what_many_names_have_in_common_is_one_problem() -> None:
    names = [f"{side}.{i}" for side in "abc" for i in range(100)]
    _, problems = renamed({"a.*": "b.*"}, *names)
    (problem,) = problems
    assert problem == (
        "rename: 'a.0' and 'b.0' would both be 'b.0', and 99 other pairs would meet too: change "
        "the rules, or drop one of the two with None"
    )
    _, problems = renamed({"a.*": "x.*", "*": "y.*"}, *names)
    (problem,) = problems
    assert problem == (
        "rename: 'a.0' is matched by ['*', 'a.*'], which disagree, as are 99 other names: change "
        "the patterns so that only one matches"
    )


def test_a_rule_that_maps_everything_to_one_name_is_one_problem() -> None:
    _, problems = renamed({"{side}.{i}": "x"}, *(f"a.{i}" for i in range(50)))
    assert len(problems) == 1
    assert "'a.0' and 'a.1' would both be 'x', and 48 other pairs" in problems[0]


# --- the rules that a user wants ----------------------------------------------------------------


def test_a_prefix_that_the_saved_names_have_is_found() -> None:
    missing = [f"model.{i}.{j}.w" for i in range(30) for j in range(30)]
    free = ["other.w", *(name.replace("model", "model.module") for name in missing)]
    rules, found = suggest_rules(missing, free, {"step"})
    assert rules == {"model.module.*": "model.*"}
    assert [*found] == missing


def test_names_that_are_wildcards_in_a_rule_are_not_recommended() -> None:
    assert suggest_rules(["m*.w"], ["m*.module.w"], ()) == (
        {"m*.module.*": "m*.*"},
        {"m*.w": "m*.module.w"},
    )
    assert suggest_rules(["m[0].w"], ["m[0].module.w"], ()) == ({}, {})
    assert suggest_rules(["{m.w"], ["{m.module.w"], ()) == ({}, {})
