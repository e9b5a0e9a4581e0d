"""A ShardingConfig turns local tensors into views, and says what each rank gets on a load."""

from __future__ import annotations

from collections import Counter
from math import prod

from msgspec.structs import replace

from dist_ckpt.core.format.geometry import Grid, Layout, Region, Shape
from dist_ckpt.core.format.index.index import Catalog, Component, TensorRecord
from dist_ckpt.core.planning.plan import TensorEntry
from dist_ckpt.core.planning.save.balance import assign_evenly
from dist_ckpt.core.planning.save.save_planner import plan_rank_files, plan_save
from dist_ckpt.core.planning.sharding_config import ShardingConfig, target_view, target_views
from dist_ckpt.core.planning.tensor_views import (
    Flattened,
    Mesh,
    MeshPlaced,
    ReplicatedAxis,
    ShardedAxis,
    View,
    Whole,
)
from tilings import inventory_of

GRID = ShardingConfig({"dp": 2, "tp": 2}, {"*.weight": {"tp": 0, "dp": 0}, "*.bias": {"tp": 0}})
MESH = Mesh(("dp", "tp"), (2, 2), (0, 1, 2, 3))
LINE = Mesh(("dp",), (4,), (0, 1, 2, 3))


def catalog_of(tensors: dict[str, Shape], components: tuple[str, ...]) -> Catalog:
    def component(fqn: str) -> int:
        return next((n for n, c in enumerate(components) if fqn.startswith(f"{c}.")), 0)

    records = {
        fqn: TensorRecord("float32", shape, 0, 0, component(fqn)) for fqn, shape in tensors.items()
    }
    layout = Layout(Grid(()), ((0,),))
    parts = tuple(Component(name, name) for name in components)
    return Catalog(1, (), parts, (layout,), records, {}, {}, {})


ADAM = catalog_of(
    {
        "model.a.weight": (8, 2),
        "model.b.weight": (3, 2),
        "model.b.bias": (4,),
        "optim.state.a.weight.exp_avg": (8, 2),
        "optim.state.a.weight.step": (),
        "optim.state.a.weight.factor": (8, 1),
        "optim.state.b.weight.exp_avg": (3, 2),
        "optim.state.b.bias.exp_avg": (4,),
        "optim.param_groups.0.lr": (),
    },
    ("model", "optim"),
)


def test_a_load_gets_the_parts_that_torch_chunk_makes() -> None:
    both = MeshPlaced(MESH, (ShardedAxis(0), ShardedAxis(0)))
    assert target_view(GRID, "a.weight", (7, 2)) == both
    assert target_view(GRID, "a.bias", (7,)) == MeshPlaced(MESH, (ReplicatedAxis(), ShardedAxis(0)))
    assert target_view(GRID, "a.scale", (7,)) == Whole()
    under = ("a.weight", (7, 2))
    assert target_view(GRID, "state.a.weight.m", (7, 2), parameter=under) == both
    assert target_view(GRID, "state.a.weight.m", (7, 1), parameter=under) == Whole()


def test_an_even_reshard_cuts_all_that_has_a_dimension() -> None:
    views = target_views(ShardingConfig.even(4), ADAM)
    rows = MeshPlaced(LINE, (ShardedAxis(0),))
    assert views["model.b.bias"] == rows
    assert views["optim.state.a.weight.exp_avg"] == rows
    assert views["optim.state.a.weight.factor"] == Whole()
    assert views["optim.state.a.weight.step"] == Whole()
    assert list(views) == list(ADAM.tensors)


def test_rules_of_a_reshard_hold_for_optimizer_state() -> None:
    config = ShardingConfig.tensor_parallel(4, {"*.weight": 1})
    views = target_views(config, ADAM)
    columns = MeshPlaced(Mesh(("tp",), (4,), (0, 1, 2, 3)), (ShardedAxis(1),))
    assert views["model.a.weight"] == columns
    assert views["optim.state.a.weight.exp_avg"] == columns
    assert views["optim.state.b.bias.exp_avg"] == Whole()


def test_state_of_an_optimizer_over_several_modules_finds_its_parameters() -> None:
    catalog = catalog_of(
        {
            "gen.w": (4, 4),
            "dis.w": (8,),
            "optim.state.gen.w.m": (4, 4),
            "optim.state.dis.w.m": (8,),
        },
        ("gen", "dis", "optim"),
    )
    config = ShardingConfig.tensor_parallel(2, {"w": 0})
    views = target_views(config, catalog)
    assert set(views.values()) == {MeshPlaced(Mesh(("tp",), (2,), (0, 1)), (ShardedAxis(0),))}


def owner(view: View) -> int | None:
    return (
        view.mesh.ranks[0] if isinstance(view, MeshPlaced) and len(view.mesh.ranks) == 1 else None
    )


def test_zero_gives_the_whole_state_of_a_parameter_to_one_rank() -> None:
    views = target_views(ShardingConfig.zero(2, 1), ADAM)
    owners = {fqn: owner(view) for fqn, view in views.items()}
    assert owners == {
        "model.a.weight": None,
        "model.b.weight": None,
        "model.b.bias": None,
        "optim.state.a.weight.exp_avg": 0,
        "optim.state.a.weight.step": 0,
        "optim.state.a.weight.factor": 0,
        "optim.state.b.weight.exp_avg": 1,
        "optim.state.b.bias.exp_avg": 1,
        "optim.param_groups.0.lr": None,
    }


def test_stage_3_gives_parameters_away_too_with_their_state() -> None:
    views = target_views(ShardingConfig.zero(2, 3), ADAM)
    for name in ("a.weight", "b.weight", "b.bias"):
        assert owner(views[f"model.{name}"]) == owner(views[f"optim.state.{name}.exp_avg"])
        assert owner(views[f"model.{name}"]) is not None


def test_flat_stage_3_cuts_all_but_what_has_another_shape() -> None:
    views = target_views(ShardingConfig.zero(4, 3, flat=True), ADAM)
    assert views["model.a.weight"] == Flattened(LINE)
    assert views["optim.state.a.weight.exp_avg"] == Flattened(LINE)
    assert views["optim.state.a.weight.factor"] == Whole()
    assert views["optim.state.a.weight.step"] == Whole()


def test_parameters_are_given_away_evenly_and_always_the_same_way() -> None:
    nbytes = {f"p{n}": (n * 37) % 101 + 1 for n in range(50)}
    owners = assign_evenly(nbytes, 4)
    loads = Counter[int]()
    for name, rank in owners.items():
        loads[rank] += nbytes[name]
    assert max(loads.values()) - min(loads.values()) <= max(nbytes.values())
    assert assign_evenly(dict(reversed(nbytes.items())), 4) == owners


def test_a_reshard_plan_stores_each_tensor_once() -> None:
    for config in (ShardingConfig.zero(2, 1), ShardingConfig.zero(2, 3, flat=True), GRID):
        views = target_views(config, ADAM)
        table = tuple(dict.fromkeys(views.values()))
        entries = tuple(
            TensorEntry(fqn, "float32", ADAM.tensors[fqn].shape, table.index(view), 0)
            for fqn, view in views.items()
        )
        inventory = replace(inventory_of({}, 0), views=table, tensors=entries)
        world = config.world_size
        plan = plan_save([(inventory, tuple(range(world)))], world)
        items = [i for rank in range(world) for f in plan_rank_files(plan, rank) for i in f.items]
        assert sum(item.cell.numel for item in items) == sum(prod(e.shape) for e in entries)
        assert Region.whole((8, 2)).numel == sum(
            item.cell.numel for item in items if item.fqn == "model.a.weight"
        )
