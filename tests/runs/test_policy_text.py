"""The grammar of policies: only rules and plain values, whatever a text holds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_ckpt.runs.policy_text import parse_rules, text_of


def test_rules_have_values_and_values_by_name():
    assert parse_rules(" last(3) | best(2, min='val/loss', x=-1.5) | at_end") == [
        ("last", (3,), {}),
        ("best", (2,), {"min": "val/loss", "x": -1.5}),
        ("at_end", (), {}),
    ]
    assert text_of("best", 2, min="a'b", max=None) == """best(2, min="a'b")"""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' is not a policy"),
        ("last(3", "is not a policy"),
        ("last(3) | ", "is not a policy"),
        ("last(3) or best(1)", r"'last\(3\) or best\(1\)' is not a rule"),
        ("last(3) & best(1)", "is not a rule"),
        ("a.b(3)", r"'a.b\(3\)' is not a rule: write it as last\(3\)"),
        ("3", "'3' is not a rule"),
        ("last(x)", "'x' is not a value: give a number, or a text in quotes"),
        ("last([1])", r"'\[1\]' is not a value"),
        ("last(1 + 1)", "is not a value"),
        ("last(True)", "'True' is not a value"),
        ("last(None)", "'None' is not a value"),
        ("last(b'x')", "is not a value"),
        ("last(1j)", "is not a value"),
        ("last(-'x')", "is not a value"),
        ("last(f'{1}')", "is not a value"),
        ("last(*x)", "is not a value"),
        ("last(**{'n': 1})", "as value or name=value"),
        ("last(n=1, n=2)", "as value or name=value"),
        ("last(3)\n| best(1)", "is not a policy"),
        ("__import__('os').system('x')", "is not a rule"),
        ("(lambda: 1)()", "is not a rule"),
        ("(" * 3000 + ")" * 1000, "is not a policy"),
        ("x" * 5000, "5000 characters: the limit is 4096"),
        ("last(3)\0", "is not a policy"),
    ],
)
def test_everything_else_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse_rules(text)


@given(st.text(max_size=200))
def test_any_text_is_rules_or_a_value_error(text):
    try:
        rules = parse_rules(text)
    except ValueError:
        return
    assert all(type(name) is str for name, _, _ in rules)


values = st.one_of(
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
)


@given(
    st.lists(values, max_size=3),
    st.dictionaries(st.from_regex("[a-z]{1,5}x", fullmatch=True), values),
)
def test_a_rule_is_what_its_text_says(some, named):
    assert parse_rules(text_of("rule", *some, **named)) == [("rule", tuple(some), named)]
