"""Several checkpoints seen as one: by a reference that goes name by name."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from hypothesis import given
from hypothesis import strategies as st

import in_memory
from dist_ckpt.core.format.objects.objects_file import ObjectsFile
from dist_ckpt.core.planning.name_selection import Selection
from dist_ckpt.core.state.binding.bind import build_saved_tree
from dist_ckpt.core.state.binding.sources.multi_source import SourceView, merge_sources
from dist_ckpt.core.state.binding.sources.saved_tree import SavedTree, Scope, split_source
from long_mode import examples
from subclass_tensors import Pair

KEYS = st.sampled_from("abc")
STATES = st.recursive(
    st.integers(0, 3).map(lambda value: torch.full((1,), float(value))) | st.integers(0, 3),
    lambda below: st.dictionaries(KEYS, below, min_size=1, max_size=3),
    max_leaves=6,
)
TOPS = st.dictionaries(KEYS, STATES, min_size=1, max_size=3)


def saved(state: Any) -> SavedTree:
    checkpoint = in_memory.save(state)
    main = checkpoint._decoded(checkpoint._main)
    return build_saved_tree(checkpoint.catalog, main, lambda _: ObjectsFile())


def reference(sources: list[list[str]]) -> dict[str, int]:
    """Return which source gives each name: the first one, unless a name above or below is taken."""
    given: dict[str, int] = {}
    for number, names in enumerate(sources):
        before = dict(given)
        for name in names:
            if not any(
                name == other or name.startswith(f"{other}.") or other.startswith(f"{name}.")
                for other in before
            ):
                given[name] = number
    return given


@examples(60)
@given(st.lists(TOPS, min_size=2, max_size=3), st.sampled_from([(), ("a",), ("*.b", "c.a")]))
def test_each_name_comes_from_the_first_that_has_it(states: Any, exclude: tuple[str, ...]) -> None:
    sources = [saved(state) for state in states]
    selections = [Selection(None, exclude), *[Selection()] * (len(sources) - 1)]
    paths = [f"/{number}" for number in range(len(sources))]
    offers = [
        SourceView(number, one, Scope(paths[number], "", selections[number]))
        for number, one in enumerate(sources)
    ]
    together = merge_sources(offers, paths)
    expected = reference(
        [
            [n for n in s.leaves if n in chosen]
            for s, chosen in zip(sources, selections, strict=True)
        ]
    )
    assert {name: split_source(fqn)[0] for name, fqn in together.leaves.items()} == expected
    assert together.problems == ()
    for name, number in expected.items():
        assert split_source(together.leaves[name])[1] == sources[number].leaves[name]
        assert (together.source_number(name), together.source_text(name)) == (
            number,
            f" in /{number}",
        )
        assert together.describe_kind(name) == sources[number].describe_kind(name)
        if together.is_value(name):
            assert together.value(name) == sources[number].value(name)
        else:
            own, there = sources[number].tensor(name), together.tensor(name)
            assert own is not None and there is not None  # noqa: PT018
            layouts = sources[number].catalog.layouts, together.catalog.layouts
            assert layouts[0][own[1].layout] == layouts[1][there[1].layout]
    # Every leaf is reached from the root, and nothing else is.
    reached: list[str] = []
    todo = [""]
    while todo:
        name = todo.pop()
        if name in together.leaves:
            reached.append(name)
        todo += [child for _, child in together.children(name)]
    assert sorted(reached) == sorted(expected)


def test_what_is_made_of_parts_comes_from_one_source() -> None:
    plain, pair = torch.ones(2, 2), Pair(torch.ones(2, 2), torch.ones(2, 2))
    nested = Pair(pair, torch.ones(2, 2))
    for first, second in ((plain, pair), (pair, plain), (pair, nested), (nested, pair)):
        one, other = saved({"w": first, "v": plain}), saved({"w": second, "u": plain})
        offers = [
            SourceView(n, s, Scope(f"/{n}", "", Selection())) for n, s in enumerate((one, other))
        ]
        together = merge_sources(offers, ["/0", "/1"])
        of_first = {name for name in together.leaves if together.source_number(name) == 0}
        assert of_first == {*one.leaves}
        assert {*together.leaves} - of_first == {"u"}


def test_sources_of_two_keys_meet_only_in_what_both_give() -> None:
    state = {"a": {"x": torch.ones(1), "y": torch.ones(1)}, "b": 1}
    one = saved(state)

    def problems(*scopes: Scope) -> tuple[str, ...]:
        return merge_sources([SourceView(0, one, scope) for scope in scopes], ["/0"]).problems

    everything = Selection()
    assert problems(Scope("/0", "a", everything), Scope("/0", "b", everything)) == ()
    (problem,) = problems(Scope("/0", "a", everything), Scope("/0", "a.x", everything))
    assert problem.startswith("a.x: the sources of 'a' and of 'a.x' both have it: ")
    (problem,) = problems(Scope("/0", "a.x", everything), Scope("/0", "a", everything))
    assert problem.startswith("a.x: ")
    without = Selection(None, ("a.x",))
    assert problems(Scope("/0", "a", without), Scope("/0", "a.x", everything)) == ()
