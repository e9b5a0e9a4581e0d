"""A ShardingConfig says what it says, in every form, and refuses what makes no sense."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_ckpt.core.format.geometry import Shape
from dist_ckpt.core.planning.sharding_config import (
    ShardingConfig,
    find_parameter,
    find_rule_view,
    strip_component,
)
from dist_ckpt.core.planning.sharding_rule import RuleMapping
from dist_ckpt.core.planning.tensor_views import Mesh, Piece

GRID = {"dp": 2, "tp": 4}


def test_a_rule_cuts_the_dimensions_that_it_names() -> None:
    config = ShardingConfig(GRID, {"*.wq.weight": {"tp": 0}, "*.wo.weight": {"tp": 1, "dp": 0}})
    assert config.view_for("layers.0.wq.weight", 2).axes == ((1,), ())
    assert config.view_for("layers.0.wo.weight", 2).axes == ((0,), (1,))
    assert config.view_for("layers.0.norm.weight", 1).axes == ((),)


def test_two_axes_on_one_dimension_nest_in_the_order_of_the_mesh() -> None:
    config = ShardingConfig(GRID, {"w": {"tp": 0, "dp": 0}})
    assert config.view_for("w", 1).axes == ((0, 1),)


def test_dimensions_may_be_counted_from_the_end() -> None:
    config = ShardingConfig(GRID, {"w": {"tp": -1}})
    assert config.view_for("w", 3).axes == ((), (), (1,))


def test_the_pieces_are_of_the_dimension_that_the_axes_cut() -> None:
    rules = {"a.*": {"tp": -1, "pieces": [4, 8]}, "b": {"dp": 0, "tp": 1, "pieces": {"tp": [4]}}}
    config = ShardingConfig(GRID, rules)
    weight, bias = config.view_for("a.weight", 2), config.view_for("a.bias", 1)
    assert (weight.dim, weight.pieces) == (1, (Piece(4, (1,)), Piece(8, (1,))))
    assert (bias.dim, bias.pieces) == (0, weight.pieces)
    both = config.view_for("b", 2)
    assert (both.axes, both.dim, both.pieces) == (((0,), (1,)), 1, (Piece(4, (1,)),))
    assert ShardingConfig.from_json(config.to_json()).view_for("b", 2) == both
    unclear = ShardingConfig(GRID, {"b": {"dp": 0, "tp": 1, "pieces": [4, 4]}})
    with pytest.raises(ValueError, match=r"name an axis .* such as \"pieces\": \{'dp': \[4, 4\]\}"):
        unclear.view_for("b", 2)
    assert ShardingConfig(GRID, {"b": {"dp": 1, "tp": -1, "pieces": [4]}}).view_for("b", 2).dim == 1


def test_a_mesh_axis_may_be_called_pieces() -> None:
    config = ShardingConfig({"pieces": 2}, {"w": {"pieces": 0}})
    assert config.view_for("w", 1).axes == ((0,),)
    assert ShardingConfig.from_json(config.to_json()) == config


def test_rules_that_differ_in_pieces_differ() -> None:
    rules: dict[str, RuleMapping] = {"*.weight": {"tp": 0, "pieces": [4, 4]}, "a.*": {"tp": 0}}
    with pytest.raises(ValueError, match="match and differ"):
        ShardingConfig(GRID, rules).view_for("a.weight", 2)


def test_patterns_see_case_and_cross_dots() -> None:
    config = ShardingConfig(GRID, {"Layers.*weight": {"tp": 0}})
    assert config.view_for("Layers.0.mlp.weight", 1).axes == ((1,),)
    assert config.view_for("layers.0.mlp.weight", 1).axes == ((),)


def test_a_tensor_without_dimensions_is_never_cut() -> None:
    assert ShardingConfig(GRID, {"*": {"tp": 0}}).view_for("num_batches_tracked", 0).axes == ()


def test_the_default_is_for_what_no_rule_matches_and_that_has_the_dimension() -> None:
    config = ShardingConfig(GRID, {"norm.*": {}}, default={"dp": 1, "tp": 0})
    assert config.view_for("w", 2).axes == ((1,), (0,))
    assert config.view_for("w", 1).axes == ((1,),)
    assert config.view_for("norm.weight", 1).axes == ((),)


def test_rules_that_match_and_differ_are_an_error() -> None:
    config = ShardingConfig(GRID, {"*.weight": {"tp": 0}, "wq.*": {"tp": 1}})
    with pytest.raises(ValueError, match=r"wq\.weight: the rules \['\*\.weight', 'wq\.\*'\] match"):
        config.view_for("wq.weight", 2)
    assert config.view_for("wk.weight", 2).axes == ((1,), ())


def test_rules_that_say_the_same_in_other_words_agree() -> None:
    config = ShardingConfig(GRID, {"*.weight": {"tp": 0}, "wq.*": {"tp": -2}})
    assert config.view_for("wq.weight", 2).axes == ((1,), ())


def test_a_rule_for_a_dimension_that_the_parameter_lacks_is_an_error() -> None:
    config = ShardingConfig(GRID, {"w": {"tp": 1}})
    with pytest.raises(
        ValueError, match="the rule 'w' for w cuts dimension 1 of a tensor that has 1"
    ):
        config.view_for("w", 1)


def test_a_rule_holds_for_what_is_stored_under_the_parameter_in_the_same_shape() -> None:
    config = ShardingConfig(GRID, {"*.weight": {"tp": 1}})
    shapes = {"l.weight": (8, 4), "l": (3,)}

    def axes_of(name: str, shape: Shape) -> tuple[tuple[int, ...], ...]:
        return find_rule_view(config, name, shape, find_parameter(name, shapes)).axes

    assert axes_of("l.weight", (8, 4)) == ((), (1,))
    assert axes_of("state.l.weight.exp_avg", (8, 4)) == ((), (1,))
    assert axes_of("state.l.weight.row.mean", (8, 4)) == ((), (1,))
    assert axes_of("state.l.weight.factor", (8, 1)) == ((), ())
    assert axes_of("state.l.weight.step", ()) == ()
    assert axes_of("state.other.weight", (8, 4)) == ((), (1,))


def test_the_parameter_that_a_tensor_is_stored_under_is_the_longest_that_fits() -> None:
    shapes = {"a.b": (1,), "a": (2,)}
    assert find_parameter("state.a.b.c", shapes) == ("a.b", (1,))
    assert find_parameter("state.a.c", shapes) == ("a", (2,))
    assert find_parameter("a.b", shapes) is None
    assert find_parameter("state.c.d", shapes) is None


def test_names_are_without_the_component() -> None:
    assert strip_component("model.w", "model") == "w"
    assert strip_component("w", "state") == "w"


def test_ranks_are_row_major_in_the_mesh() -> None:
    config = ShardingConfig(GRID)
    assert config.world_size == 8
    assert config.ranks() == Mesh(("dp", "tp"), (2, 4), tuple(range(8)))


def test_the_constructors_say_what_their_names_say() -> None:
    assert not any(ShardingConfig.replicated(4).view_for("w", 2).axes)
    assert ShardingConfig.even(4).view_for("w", 2).axes == ((0,), ())
    assert ShardingConfig.even(4).view_for("w", 0).axes == ()
    parallel = ShardingConfig.tensor_parallel(4, {"*.wq.weight": 0, "*.wo.weight": 1})
    assert parallel.view_for("l.wo.weight", 2).axes == ((), (0,))
    assert ShardingConfig.zero(4, 2) == ShardingConfig({"dp": 4}, zero_stage=2)
    flat = ShardingConfig.zero(4, 3, flat=True, shapes={"w": (2, 3)})
    assert (flat.flat, flat.shapes) == (True, {"w": (2, 3)})


# --- as text ---------------------------------------------------------------------------------

axes = st.sampled_from(["dp", "tp", "ep"])
dims = st.dictionaries(axes, st.integers(-3, 3))
sizes = st.lists(
    st.integers(1, 9) | st.fixed_dictionaries({"size": st.integers(1, 9), "axes": st.just([])}),
    min_size=1,
)
fused_rule = st.builds(lambda n, pieces: {"tp": n, "pieces": pieces}, st.integers(-3, 3), sizes)
rule = dims | fused_rule | fused_rule.map(lambda r: {**r, "pieces": {"tp": r["pieces"]}})
configs = st.builds(
    ShardingConfig,
    st.fixed_dictionaries({"ep": st.integers(1, 3), "dp": st.integers(1, 4), "tp": st.just(2)}),
    st.dictionaries(st.text(), rule),
    dims,
) | st.builds(
    lambda n, stage, shapes: ShardingConfig.zero(n, stage, flat=True, shapes=shapes),
    st.integers(1, 9),
    st.integers(1, 3),
    st.dictionaries(st.text(), st.lists(st.integers(0, 5)).map(tuple)),
)


@given(config=configs)
def test_json_gives_an_equal_config_back(config: ShardingConfig) -> None:
    again = ShardingConfig.from_json(config.to_json())
    assert again == config
    assert hash(again) == hash(config)
    assert list(again.mesh) == list(config.mesh)
    assert again.shapes == config.shapes


def test_the_order_of_the_mesh_counts() -> None:
    assert ShardingConfig({"dp": 2, "tp": 2}) != ShardingConfig({"tp": 2, "dp": 2})
    assert ShardingConfig({"dp": 2}) != "dp"


def test_a_file_says_the_same_in_json_and_toml(tmp_path: Path) -> None:
    pieces = [8, {"size": 4, "axes": []}]
    rules: dict[str, RuleMapping] = {
        "*.wq.weight": {"tp": 0},
        "*.fc1.*": {"tp": 0, "pieces": pieces},
    }
    config = ShardingConfig(GRID, rules, {"dp": 0})
    (tmp_path / "a.json").write_text(config.to_json())
    (tmp_path / "a.toml").write_text(
        'mesh = {dp = 2, tp = 4}\ndefault = {dp = 0}\n[rules."*.wq.weight"]\ntp = 0\n'
        '[rules."*.fc1.*"]\ntp = 0\npieces = [8, {size = 4, axes = []}]\n'
    )
    assert ShardingConfig.from_file(tmp_path / "a.json") == config
    assert ShardingConfig.from_file(str(tmp_path / "a.toml")) == config


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", "{", "not JSON"),
        ("a.json", "[" * 5000, "not JSON"),
        ("a.toml", "mesh = " + "[" * 5000, "nested too deeply"),
        ("a.json", "[]", "is a table, not a list"),
        ("a.json", "{}", "needs a mesh"),
        ("a.json", '{"mesh": {"dp": 2}, "mesh": {"dp": 3}}', "a key appears twice"),
        ("a.json", '{"mesh": {"dp": 2}, "rule": {}}', r"unknown keys \['rule'\]"),
        ("a.json", '{"mesh": {"dp": 2.0}}', "mesh has 'dp': 2.0"),
        ("a.toml", "mesh", "a.toml"),
        ("a.yaml", "", "a .json or a .toml file"),
    ],
)
def test_a_file_that_says_nothing_sensible_is_an_error_that_names_it(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises((ValueError, TypeError), match=message) as raised:
        ShardingConfig.from_file(tmp_path / name)
    assert name in str(raised.value)


def test_a_file_that_is_not_there_or_no_text_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "bytes.json").write_bytes(b"\xff")
    for name in ("missing.toml", "bytes.json"):
        with pytest.raises(ValueError, match=f"{name} cannot be read .*: give the path of"):
            ShardingConfig.from_file(tmp_path / name)


# --- what makes no sense ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"mesh": {}}, ValueError, "needs a mesh"),
        ({"mesh": 4}, TypeError, "mesh is a int"),
        ({"mesh": {"dp": 0}}, ValueError, "mesh axis 'dp' of size 0"),
        ({"mesh": {"dp": 1000, "tp": 1001}}, ValueError, "1001000 ranks: at most 1000000"),
        ({"mesh": {"": 2}}, ValueError, "mesh axis '' of size 2"),
        ({"mesh": {"dp": True}}, TypeError, "mesh has 'dp': True"),
        ({"mesh": {"dp": "2"}}, TypeError, "mesh has 'dp': '2'"),
        ({"mesh": GRID, "rules": [("w", 0)]}, TypeError, "rules are a list"),
        ({"mesh": GRID, "rules": {"w": 0}}, TypeError, "the rule 'w' is a int"),
        ({"mesh": GRID, "rules": {3: {}}}, TypeError, "rules have 3"),
        ({"mesh": GRID, "rules": {"w": {"pp": 0}}}, ValueError, r"names \['pp'\]: the mesh has"),
        ({"mesh": GRID, "rules": {"w": {"tp": None}}}, TypeError, "'tp': None"),
        ({"mesh": GRID, "default": {"pp": 0}}, ValueError, "'default' names"),
        ({"mesh": GRID, "default": {"tp": 0, "pieces": [2]}}, TypeError, "'pieces': \\[2\\]"),
        (
            {"mesh": GRID, "rules": {"w": {"tp": 0, "pieces": 4}}},
            ValueError,
            "names \\['pieces'\\]",
        ),
        ({"mesh": GRID, "rules": {"w": {"tp": 0, "pieces": "44"}}}, TypeError, "'pieces': '44'"),
        ({"mesh": GRID, "rules": {"w": {"tp": 0, "pieces": []}}}, ValueError, "the size of each"),
        ({"mesh": GRID, "rules": {"w": {"pieces": [4]}}}, ValueError, "an axis that cuts them"),
        ({"mesh": GRID, "rules": {"w": {"tp": 0, "pieces": [4, 0]}}}, ValueError, "0 is not the"),
        ({"mesh": GRID, "rules": {"w": {"tp": 0, "pieces": [True]}}}, ValueError, "True is not"),
        ({"mesh": GRID, "rules": {"w": {"tp": 0, "pieces": [4.0]}}}, ValueError, "4.0 is not"),
        (
            {"mesh": GRID, "rules": {"w": {"tp": 0, "pieces": {"dp": [4]}}}},
            ValueError,
            r"pieces for \['dp'\]: name one of its axes \['tp'\]",
        ),
        (
            {"mesh": GRID, "rules": {"w": {"tp": 0, "pieces": {"tp": 4}}}},
            TypeError,
            "has pieces 4: give a list",
        ),
        (
            {"mesh": GRID, "rules": {"w": {"tp": 0, "pieces": [{"size": 4, "axes": ["dp"]}]}}},
            ValueError,
            r"with some of the axes \['tp'\]",
        ),
        (
            {"mesh": GRID, "rules": {"w": {"tp": 0, "pieces": [{"size": 4}]}}},
            ValueError,
            "is not a piece",
        ),
        ({"mesh": {"dp": 2}, "zero_stage": 4}, ValueError, "stages 1, 2 and 3"),
        ({"mesh": {"dp": 2}, "zero_stage": "1"}, TypeError, "zero_stage='1'"),
        ({"mesh": {"dp": 2}, "flat": True}, ValueError, "give zero_stage"),
        ({"mesh": GRID, "zero_stage": 1}, ValueError, "a mesh of one axis"),
        ({"mesh": {"dp": 2}, "default": {"dp": 0}, "zero_stage": 1}, ValueError, "no rules"),
        ({"mesh": {"dp": 2}, "shapes": {"w": (2,)}}, ValueError, "shapes= is only for flat=True"),
        (
            {"mesh": {"dp": 2}, "zero_stage": 3, "flat": True, "shapes": {"w": (-1,)}},
            TypeError,
            "shapes have 'w'",
        ),
        (
            {"mesh": {"dp": 2}, "zero_stage": 3, "flat": True, "shapes": {"w": 4}},
            TypeError,
            "shapes have 'w': 4",
        ),
    ],
)
def test_a_config_that_makes_no_sense_cannot_be_built(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        ShardingConfig(**arguments)


def test_the_constructors_refuse_what_they_do_not_know() -> None:
    with pytest.raises(ValueError, match="use replicated"):
        ShardingConfig.zero(4, 0)
    with pytest.raises(TypeError, match="split_dims maps patterns to dimensions"):
        ShardingConfig.tensor_parallel(4, ["w"])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="of size 0"):
        ShardingConfig.even(0)


def test_what_a_config_was_built_from_may_change_afterwards() -> None:
    mesh, rules = {"dp": 2}, {"w": {"dp": 0}}
    config = ShardingConfig(mesh, rules)
    mesh["dp"] = 3
    rules["w"]["dp"] = 1
    assert config == ShardingConfig({"dp": 2}, {"w": {"dp": 0}})


def test_planning_needs_no_torch() -> None:
    rooms = "sharding_config", "save.save_planner", "load.load_planner", "load.shared_ranges"
    imports = ", ".join(f"dist_ckpt.core.planning.{room}" for room in rooms)
    code = f"import sys, {imports}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
