"""`dc.ShardingConfig`: rules that make plain local tensors parts of global tensors. No DTensors.

A save uses a config to find the global tensor of a local one. A load and `dc.reshard` use it to
find the part of each rank. Every rank passes the same config. It needs no torch.

After a load or a reshard, stored tensors have views under a ShardingConfig: see the end.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from math import prod
from pathlib import Path

from dist_ckpt.core.format.dtypes import DTYPES
from dist_ckpt.core.format.geometry import Cell, Shape
from dist_ckpt.core.format.index.index import JOINED, Catalog, Node
from dist_ckpt.core.format.index.index_json import MAX_WORLD_SIZE
from dist_ckpt.core.format.index.tensor_ranges import parameter_ranges
from dist_ckpt.core.planning.name_selection import excluded_names
from dist_ckpt.core.planning.plan import Inventory, SavePlan, TensorEntry
from dist_ckpt.core.planning.save.balance import assign_evenly
from dist_ckpt.core.planning.save.save_planner import check_num_tensors, plan_save
from dist_ckpt.core.planning.sharding_rule import (
    RuleMapping,
    ShardingRule,
    check_numbers,
    parse_axes,
    parse_rule,
)
from dist_ckpt.core.planning.tensor_views import (
    Flattened,
    Mesh,
    MeshPlaced,
    ReplicatedAxis,
    RuleSharded,
    View,
    Whole,
    chunked_view,
)
from dist_ckpt.message_text import names_around_remedy

_KEYS = ("mesh", "rules", "default", "zero_stage", "flat", "shapes")


@dataclass(frozen=True, slots=True, eq=False)
class ShardingConfig:
    """How tensors are cut over a mesh of ranks, by rules on the names of parameters.

    `mesh` has axis names and sizes, slowest axis first: ranks are row-major in it. `rules` map a
    pattern on a parameter's name, without its component, to {mesh axis: tensor dimension}. Patterns
    are `fnmatchcase` (`*` also matches dots); an axis that is not named replicates. Two axes on one
    dimension nest in the order of the mesh. `default` is the rule for all other names, without the
    dimensions that a tensor lacks. Two rules that match a name and differ are an error.

    A rule also applies to tensors of the same shape that belong to the parameter (optimizer state).
    Others, and tensors without dimensions, are replicas. On a save the parts may be uneven: the
    global size is their sum along the axis. On a load they are those of `torch.chunk`.

    A fused tensor is several matrices along one dimension, such as gate and up, or q, k and v.
    Each rank has its part of each. The rule of a fused tensor also has `"pieces"`: their global
    sizes along that dimension, as in `{"tp": 0, "pieces": [64, 64]}`. Each piece is cut as
    `torch.chunk` does. A piece that fewer axes cut is `{"size": 64, "axes": ["kv"]}`. If the rule
    cuts two dimensions, name an axis of the fused one: `"pieces": {"tp": [64, 64]}`. A save stores
    the pieces.

    `zero_stage` 1 or 2 partitions the optimizer's state over all ranks, 3 all tensors. Ranks get
    whole parameters or, if `flat`, even ranges of each tensor's elements, in one dimension.
    `shapes` has the global shapes of the parameters. Stage 3 with `flat` needs them for every
    one-dimensional tensor except a module's buffers. A tensor that all ranks hold whole has its own
    shape there.

    Raises ValueError or TypeError for invalid arguments.
    """

    mesh: Mapping[str, int]
    rules: Mapping[str, RuleMapping] = field(default_factory=dict)
    default: Mapping[str, int] = field(default_factory=dict)
    zero_stage: int = field(default=0, kw_only=True)
    flat: bool = field(default=False, kw_only=True)
    shapes: Mapping[str, Shape] = field(default_factory=dict, kw_only=True)
    _rules: Mapping[str, ShardingRule] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        mesh = check_numbers("mesh", self.mesh)
        if not mesh:
            raise ValueError("a ShardingConfig needs a mesh, such as {'dp': 2, 'tp': 4}")
        for axis, size in mesh.items():
            if not axis or size < 1:
                raise ValueError(f"mesh axis {axis!r} of size {size}: give a name and at least 1")
        if prod(mesh.values()) > MAX_WORLD_SIZE:
            raise ValueError(f"a mesh of {prod(mesh.values())} ranks: at most {MAX_WORLD_SIZE}")
        if not isinstance(self.rules, Mapping):
            raise TypeError(f"rules are a {type(self.rules).__name__}: map patterns to axes")
        rules = {pattern: parse_rule(pattern, rule, mesh) for pattern, rule in self.rules.items()}
        object.__setattr__(self, "mesh", mesh)
        object.__setattr__(self, "_rules", rules)
        object.__setattr__(self, "rules", {key: rule.as_document() for key, rule in rules.items()})
        object.__setattr__(self, "default", parse_axes("the rule 'default'", self.default, mesh))
        object.__setattr__(self, "shapes", _check_shapes(self.shapes))
        self._check_zero()

    def _check_zero(self) -> None:
        if type(self.zero_stage) is not int or type(self.flat) is not bool:
            raise TypeError(
                f"zero_stage={self.zero_stage!r}, flat={self.flat!r}: give an int and a bool"
            )
        if self.zero_stage not in (0, 1, 2, 3):
            raise ValueError(f"zero_stage={self.zero_stage}: there are stages 1, 2 and 3")
        if self.zero_stage and (len(self.mesh) > 1 or self.rules or self.default):
            raise ValueError(
                "ZeRO partitions over all ranks: give a mesh of one axis, and no rules"
            )
        if self.flat and not self.zero_stage:
            raise ValueError("flat=True needs ZeRO: give zero_stage 1, 2 or 3")
        if self.shapes and not self.flat:
            raise ValueError("shapes= is only for flat=True: leave it out")

    # --- constructors ---

    @classmethod
    def replicated(cls, world_size: int) -> ShardingConfig:
        """Return the config under which every rank holds every tensor whole."""
        return cls({"dp": world_size})

    @classmethod
    def even(cls, world_size: int) -> ShardingConfig:
        """Return the config that cuts every tensor evenly along its first dimension."""
        return cls({"dp": world_size}, default={"dp": 0})

    @classmethod
    def tensor_parallel(cls, world_size: int, split_dims: Mapping[str, int]) -> ShardingConfig:
        """Return the config that cuts tensors, by pattern, along one dimension each."""
        if not isinstance(split_dims, Mapping):
            raise TypeError("split_dims maps patterns to dimensions, e.g. {'*.wq.weight': 0}")
        return cls({"tp": world_size}, {name: {"tp": dim} for name, dim in split_dims.items()})

    @classmethod
    def zero(
        cls,
        world_size: int,
        stage: int,
        *,
        flat: bool = False,
        shapes: Mapping[str, Shape] | None = None,
    ) -> ShardingConfig:
        """Return the config of a ZeRO stage: 1, 2 (optimizer state) or 3 (parameters too)."""
        if stage == 0:
            raise ValueError("stage=0: ZeRO has stages 1, 2 and 3; use replicated(world_size)")
        return cls({"dp": world_size}, zero_stage=stage, flat=flat, shapes=shapes or {})

    # --- as text ---

    def to_json(self) -> str:
        """Return the config as a JSON document, for `from_json`."""
        values = {key: getattr(self, key) for key in _KEYS}
        return json.dumps({k: v for k, v in values.items() if v or k == "mesh"}, indent=2)

    @classmethod
    def from_json(cls, text: str) -> ShardingConfig:
        """Return the config of a JSON document. Raises ValueError or TypeError."""
        try:
            document = json.loads(text, object_pairs_hook=check_unique_keys)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"not JSON: {error}") from error
        return cls._from_document(document)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> ShardingConfig:
        """Return the config in a file whose name ends in .json or .toml.

        Raises ValueError or TypeError, with the path, if the file is missing or invalid.
        """
        file = Path(path)
        if file.suffix not in (".json", ".toml"):
            raise ValueError(f"{file}: a ShardingConfig is a .json or a .toml file")
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(
                f"{file} cannot be read ({error}): give the path of a ShardingConfig's file"
            ) from error
        try:
            if file.suffix == ".json":
                return cls.from_json(text)
            return cls._from_document(tomllib.loads(text))
        except RecursionError as error:
            raise ValueError(f"{file} is nested too deeply") from error
        except (ValueError, TypeError) as error:
            raise type(error)(f"{file}: {error}") from error

    @classmethod
    def _from_document(cls, document: object) -> ShardingConfig:
        if not isinstance(document, dict):
            raise TypeError(f"a ShardingConfig is a table, not a {type(document).__name__}")
        if unknown := sorted(document.keys() - set(_KEYS)):
            raise ValueError(f"unknown keys {unknown}: a ShardingConfig has {list(_KEYS)}")
        return cls(**{"mesh": {}, **document})

    def __eq__(self, other: object) -> bool:
        # The order of the mesh counts, which dict's own equality ignores.
        return isinstance(other, ShardingConfig) and self.to_json() == other.to_json()

    def __hash__(self) -> int:
        return hash(self.to_json())

    # --- axes ---

    @property
    def world_size(self) -> int:
        """The number of ranks of the mesh."""
        return prod(self.mesh.values())

    def ranks(self) -> Mesh:
        """Return the ranks as a mesh, for planners."""
        return _build_mesh(tuple(self.mesh.items()))

    def view_for(self, name: str, ndim: int) -> RuleSharded:
        """Return how the mesh axes cut each dimension of a parameter, and its pieces.

        `name` has no component. Raises ValueError if rules that match it differ, or cut a dimension
        that it lacks. A tensor without dimensions is never cut.
        """
        if ndim == 0:
            return RuleSharded(self.ranks(), ())
        matching = {
            pattern: rule.view(self.ranks(), ndim, f"the rule {pattern!r} for {name}")
            for pattern, rule in self._rules.items()
            if fnmatchcase(name, pattern)
        }
        if len(set(matching.values())) > 1:
            raise ValueError(
                f"{name}: the rules {sorted(matching)} match and differ: "
                "make the patterns such that one matches, or that they agree"
            )
        if matching:
            return next(iter(matching.values()))
        fitting = {axis: dim for axis, dim in self.default.items() if -ndim <= dim < ndim}
        return ShardingRule(fitting).view(self.ranks(), ndim, "the default")

    @property
    def has_pieces(self) -> bool:
        """True if a rule names the pieces of a fused tensor."""
        return any(rule.pieces for rule in self._rules.values())

    def names_state(self, name: str) -> bool:
        """Return True if a rule is for an entry of optimizer state, such as `*.exp_avg`."""
        key = name.rpartition(".")[2]
        return any(
            pattern.rpartition(".")[2] == key and fnmatchcase(name, pattern)
            for pattern in self.rules
        )

    def has_rule(self, name: str) -> bool:
        """Return True if a rule matches a parameter, so that `default` does not apply to it."""
        return any(fnmatchcase(name, pattern) for pattern in self.rules)


def strip_component(fqn: str, component: str) -> str:
    """Return the name that patterns match: without the component."""
    return fqn.removeprefix(f"{component}.")


def find_parameter(name: str, shapes: Mapping[str, Shape]) -> tuple[str, Shape] | None:
    """Return the parameter of `state.<param>.<name>` and its shape, or None."""
    if not name.startswith("state."):
        return None
    above = name.removeprefix("state.")
    while "." in above:
        above = above.rpartition(".")[0]
        if above in shapes:
            return above, shapes[above]
    return None


def find_rule_view(
    config: ShardingConfig, name: str, shape: Shape, parameter: tuple[str, Shape] | None
) -> RuleSharded:
    """Return how a tensor is cut. `parameter` is the name and shape of its parameter."""
    if parameter is None or config.names_state(name):
        return config.view_for(name, len(shape))
    if parameter[1] != shape:
        return RuleSharded(config.ranks(), ((),) * len(shape))
    return config.view_for(parameter[0], len(shape))


# All tensors share one mesh: it has an entry for each rank of the job.
@lru_cache(maxsize=16)
def _build_mesh(axes: tuple[tuple[str, int], ...]) -> Mesh:
    sizes = tuple(size for _, size in axes)
    return Mesh(tuple(name for name, _ in axes), sizes, tuple(range(prod(sizes))))


def _check_shapes(value: object) -> dict[str, Shape]:
    if not isinstance(value, Mapping):
        raise TypeError(f"shapes are a {type(value).__name__}: map names to shapes")
    for name, shape in value.items():
        sizes = shape if isinstance(shape, tuple | list) else (None,)
        if type(name) is not str or any(type(n) is not int or n < 0 for n in sizes):
            raise TypeError(f"shapes have {name!r}: {shape!r}: map names to tuples of sizes")
    return {name: tuple(shape) for name, shape in value.items()}


def check_unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return an object of JSON. ValueError for a key that it has twice."""
    document = dict(pairs)
    if len(document) < len(pairs):
        raise ValueError(f"a key appears twice among {[key for key, _ in pairs]}")
    return document


def target_view(
    config: ShardingConfig,
    name: str,
    shape: Shape,
    *,
    parameter: tuple[str, Shape] | None = None,
    owner: int | None = None,
) -> View:
    """Return the view of a tensor of global `shape` after a load or reshard.

    `parameter` is the name and shape of the parameter that the tensor belongs to. `owner` is the
    rank that gets the tensor if ranks own whole parameters. With None, any rank may have it.
    """
    if _is_partitioned(config, parameter):
        if config.flat and shape and (parameter is None or parameter[1] == shape):
            return Flattened(config.ranks())
        if not config.flat and owner is not None:
            return MeshPlaced(Mesh(("owner",), (1,), (owner,)), (ReplicatedAxis(),))
    view = find_rule_view(config, name, shape, parameter)
    try:
        return chunked_view(view, shape) if any(view.axes) else Whole()
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def target_views(config: ShardingConfig, catalog: Catalog) -> dict[str, View]:
    """Return the view of each tensor of a checkpoint after a reshard."""
    names: dict[str, str] = {}
    rule_names: dict[str, str] = {}
    shapes: dict[str, Shape] = {}
    for fqn, record in catalog.tensors.items():
        names[fqn] = strip_component(fqn, catalog.components[record.component].name)
        # An optimizer over several modules prefixes its parameters with the names of the modules.
        for name in (names[fqn], fqn):
            shapes.setdefault(name, record.shape)
            rule_names.setdefault(name, names[fqn])
    parameters: dict[str, tuple[str, Shape] | None] = {}
    nbytes: dict[str, int] = {}
    for fqn, record in catalog.tensors.items():
        parameter = find_parameter(names[fqn], shapes)
        parameters[fqn] = parameter and (rule_names[parameter[0]], parameter[1])
        if _is_partitioned(config, parameter):
            name = rule_names[parameter[0]] if parameter else names[fqn]
            size = prod(record.shape) * DTYPES[record.dtype].itemsize
            nbytes[name] = nbytes.get(name, 0) + size
    owners = assign_evenly(nbytes, config.world_size)
    views: dict[str, View] = {}
    for fqn, record in catalog.tensors.items():
        parameter = parameters[fqn]
        owner = owners.get(parameter[0] if parameter else names[fqn])
        views[fqn] = target_view(config, names[fqn], record.shape, parameter=parameter, owner=owner)
    return views


def plan_reshard(
    catalog: Catalog, config: ShardingConfig, tree: tuple[Node, ...], numpy: tuple[str, ...]
) -> SavePlan:
    """Return the plan by which the ranks of `config` save the content of a checkpoint."""
    components = tuple(component.name for component in catalog.components)
    views: dict[View, int] = {}
    tensors = []
    for fqn, view in target_views(config, catalog).items():
        record = catalog.tensors[fqn]
        number = views.setdefault(view, len(views))
        tensors.append(TensorEntry(fqn, record.dtype, record.shape, number, record.component))
    inventory = Inventory(
        mesh=catalog.mesh,
        components=components,
        views=tuple(views),
        tensors=tuple(tensors),
        aliases=tuple(catalog.aliases.items()),
        values=tuple(catalog.values),
        per_rank=(),
        tree=tree,
        name_lists=(),
        numpy=numpy,
        parameters=parameter_ranges((entry.fqn for entry in tensors), catalog.parameters),
    )
    inventories = [(inventory, tuple(range(config.world_size)))]
    check_num_tensors(inventories, config.world_size)
    plan = plan_save(inventories, config.world_size)
    # Per-rank keys and the mesh still describe the ranks that saved. The values are distributed
    # over the new ranks: an objects file has a size limit.
    per_rank = {
        fqn: tuple((key, number % config.world_size) for number, (key, _) in enumerate(keys))
        for fqn, keys in catalog.per_rank.items()
    }
    # A tensor that a rule of `config` cuts plainly is still fused.
    fused = {**catalog.fused, **plan.catalog.fused}
    described = replace(plan.catalog, per_rank=per_rank, fused=fused, versions=catalog.versions)
    return replace(plan, catalog=replace(described, replicas=catalog.replicas))


def find_recut_problem(
    config: ShardingConfig, uncut: Mapping[str, str], before: Catalog, after: Catalog
) -> str | None:
    """Return the error text for parts of single ranks (`JOINED`) that a reshard would cut anew."""
    recut = [
        fqn
        for fqn, how in uncut.items()
        if how == JOINED
        and fqn in before.tensors
        and fqn in after.tensors
        and not config.names_state(fqn)
        and _cells(before, fqn) != _cells(after, fqn)
    ]
    if not recut:
        return None
    pattern = f"*.{recut[0].rpartition('.')[2]}"
    text, rest = names_around_remedy(recut)
    return (
        f"{text}: each part may have a meaning only on the rank that saved it, so it cannot be cut "
        f"in another way. Leave it out ({excluded_names(pattern)}). If it has a value for each "
        f"element, name it in a rule when you save: sharding=dc.ShardingConfig(mesh, "
        f"{{{pattern!r}: {{axis: dim}}}}){rest}"
    )


def _cells(catalog: Catalog, fqn: str) -> set[Cell]:
    layout = catalog.layouts[catalog.tensors[fqn].layout]
    return {layout.cell(number) for number in range(layout.cut.num_cells)}


def _is_partitioned(config: ShardingConfig, parameter: tuple[str, Shape] | None) -> bool:
    return config.zero_stage == 3 or (config.zero_stage > 0 and parameter is not None)
