"""Which values a load may read: those that are not are no matter, so in doubt it says yes."""

from __future__ import annotations

from typing import Any

import pytest

import dist_ckpt as dc
from dist_ckpt.core.loading.load_options import LoadOptions
from dist_ckpt.interop.dcp.adapter import RequiredValues

SAVED = ("args", "w", "deep.args", "deep.n", "optim.param_groups.0.lr", "optim.state.w.step")

CASES: tuple[tuple[dict[Any, object], dict[str, Any], set[str]], ...] = (
    # All of it, or what the state has at its top.
    ({}, {}, {*SAVED}),
    ({"w": 0}, {}, {"w"}),
    ({"w": 0, "deep": {"n": 0}}, {}, {"w", "deep.args", "deep.n"}),
    ({"other": 0}, {}, set()),
    ({1: 0, "w": 0}, {}, {"w"}),
    # What is excluded, but of an optimizer only with all of it.
    ({}, {"exclude": "args"}, {*SAVED} - {"args"}),
    ({}, {"exclude": "*args"}, {*SAVED} - {"args", "deep.args"}),
    ({"deep": 0, "args": 0}, {"exclude": "deep.args"}, {"args", "deep.n"}),
    ({"optim": 0}, {"exclude": "optim.param_groups"}, {*SAVED[4:]}),
    ({"optim": 0, "w": 0}, {"exclude": "optim"}, {"w"}),
    # What is not included, if no pattern may be about anything below its top.
    ({"w": 0, "args": 0}, {"include": "w"}, {"w"}),
    ({}, {"include": "w"}, {"w"}),
    ({"w": 0, "deep": 0}, {"include": "deep.n"}, {"deep.args", "deep.n"}),
    ({"w": 0, "deep": 0}, {"include": ["deep.n"], "exclude": "deep.args"}, {"deep.n"}),
    ({"w": 0, "deep": 0}, {"include": "*.n"}, {"w", "deep.args", "deep.n"}),
    ({"optim": 0}, {"include": "optim.state"}, {*SAVED[4:]}),
    # Patterns are about names in the state; a rename says which these are.
    ({"v": 0}, {"rename": {"w": "v"}}, {"w", *SAVED[4:]}),
    ({"v": 0}, {"rename": {"w": "v"}, "exclude": "v"}, {*SAVED[4:]}),
    ({"v": 0}, {"rename": {"w": "v"}, "include": "v"}, {"w", *SAVED[4:]}),
    ({}, {"rename": {"args": None}}, {*SAVED} - {"args"}),
    ({"deeper": 0}, {"rename": {"deep.*": "deeper.*"}}, {"deep.args", "deep.n", *SAVED[4:]}),
    ({"v": 0}, {"rename": {"deep.*": "v.*"}, "exclude": "v.n"}, {"deep.args", *SAVED[4:]}),
)


@pytest.mark.parametrize(("state", "options", "read"), CASES)
def test_what_may_be_read(
    state: dict[Any, object], options: dict[str, Any], read: set[str]
) -> None:
    may_read = RequiredValues(state, "path", LoadOptions(**options))
    assert {name for name in SAVED if may_read(name)} == read


def test_sources_say_themselves_what_is_of_them() -> None:
    for path in (dc.Source("a"), ["a", "b"], {"w": "a"}):
        assert RequiredValues({"w": 0}, path, LoadOptions(exclude="args"))("args")
