"""The part of the index that says what is stored and by whom, as JSON, and back.

What `decode_catalog` returns is whole: numbers are in range, names stand for one thing, and every
layout tiles the tensors that have it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import chain, pairwise
from math import prod

from dist_ckpt.core.format import filenames, strict_json
from dist_ckpt.core.format.geometry import Shape
from dist_ckpt.core.format.index.index import MAX_KEY_DEPTH, Catalog, Component, Key, TensorRecord
from dist_ckpt.core.format.layout import Cut, Flat, Grid, Layout, Regions, check_cut
from dist_ckpt.core.format.strict_json import (
    Json,
    array,
    corrupt_error,
    decode_dtype,
    decode_region,
    decode_shape,
    fields,
    integer,
    integers,
    mapping,
    quoted,
    row,
    string,
)

CATALOG_FIELDS = (
    *("world_size", "mesh", "components", "holders", "layouts"),
    *("tensors", "aliases", "values", "per_rank", "parameters"),
)

MAX_WORLD_SIZE = 1_000_000
MAX_FQN_CHARS = 4096

# Of all tables of holders together: a short line can ask for many.
MAX_CELLS = 1 << 24

HolderTable = tuple[tuple[int, ...], ...]


# --- encoding --------------------------------------------------------------------------------


class EncodedCatalog:
    """The fields of a catalog as text, the same in every index that has it: made once.

    `was_read` says that an index with this text was decoded, whole, to this catalog.
    """

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self.was_read = False

    @cached_property
    def fields(self) -> bytes:
        """The fields, without the braces around them. ValueError if JSON cannot say them."""
        return strict_json.dump(encode_catalog(self.catalog))[1:-1]


def encode_catalog(catalog: Catalog) -> dict[str, Json]:
    """Return the fields of a catalog; tables of holders that are equal become one."""
    tables: dict[HolderTable, int] = {}
    layouts: list[Json] = []
    for layout in catalog.layouts:
        number = tables.setdefault(layout.holders, len(tables))
        layouts.append({**_encode_cut(layout.cut), "holders": number})
    return {
        "world_size": catalog.world_size,
        "mesh": [[name, size] for name, size in catalog.mesh],
        "components": [[component.name, component.stem] for component in catalog.components],
        "holders": [_encode_holders(holders) for holders in tables],
        "layouts": layouts,
        "tensors": {
            fqn: [
                tensor.dtype,
                list(tensor.shape),
                tensor.layout,
                tensor.rotation,
                tensor.component,
            ]
            for fqn, tensor in catalog.tensors.items()
        },
        "aliases": dict(catalog.aliases),
        "values": dict(catalog.values),
        "per_rank": {
            fqn: [[_encode_key(key), rank] for key, rank in keys]
            for fqn, keys in catalog.per_rank.items()
        },
        "parameters": [
            [first, count, trainable]
            for first, count, trainable in runs_of(catalog.tensors, catalog.parameters)
        ],
    }


def runs_of(
    names: Iterable[str], parameters: Mapping[str, bool]
) -> tuple[tuple[int, int, bool], ...]:
    """Return (first, count, trainable) of each run of names, in order, that are parameters."""
    runs: list[tuple[int, int, bool]] = []
    for number, name in enumerate(names if parameters else ()):
        if (trainable := parameters.get(name)) is None:
            continue
        if runs and runs[-1][0] + runs[-1][1] == number and runs[-1][2] is trainable:
            runs[-1] = runs[-1][0], runs[-1][1] + 1, trainable
        else:
            runs.append((number, 1, trainable))
    return tuple(runs)


def _encode_cut(cut: Cut) -> dict[str, Json]:
    if isinstance(cut, Grid):
        return {"grid": [list(cuts) for cuts in cut.cuts]}
    if isinstance(cut, Flat):
        return {"flat": list(cut.cuts)}
    return {"regions": [[list(region.offset), list(region.shape)] for region in cut.regions]}


def _encode_holders(holders: HolderTable) -> Json:
    # One rank a cell, in order: the usual sharding, whose table grows with the job.
    first = holders[0][0]
    if len(holders) > 1 and holders == tuple((first + c,) for c in range(len(holders))):
        return {"each": [first, len(holders)]}
    return [list(ranks) for ranks in holders]


def _encode_key(key: Key) -> Json:
    return [_encode_key(part) for part in key] if isinstance(key, tuple) else key


# --- decoding --------------------------------------------------------------------------------


def decode_catalog(doc: Mapping[str, Json], tensors_text: bytes, what: str) -> Catalog:
    """Return the catalog that these fields say; CorruptError if they are not whole.

    The tensors are not parsed yet.
    """
    world_size = integer(doc["world_size"], 1, MAX_WORLD_SIZE, f"{what}, world_size")
    components = _decode_components(doc["components"], f"{what}, components")
    layouts = _decode_layouts(
        doc["layouts"], _decode_holders(doc["holders"], world_size, what), what
    )
    tensors = _decode_tensors(tensors_text, layouts, len(components), what)
    aliases = {
        fqn: string(target, f"{what}, aliases")
        for fqn, target in mapping(doc["aliases"], f"{what}, aliases").items()
    }
    values = {
        fqn: integer(rank, 0, world_size - 1, f"{what}, values")
        for fqn, rank in mapping(doc["values"], f"{what}, values").items()
    }
    per_rank = {
        fqn: _decode_per_rank(keys, world_size, f"{what}, per_rank, {fqn!r}")
        for fqn, keys in mapping(doc["per_rank"], f"{what}, per_rank").items()
    }
    _check_names((tensors, aliases, values, per_rank), what)
    for fqn, target in aliases.items():
        if target not in tensors:
            raise corrupt_error(what, f"{fqn!r} is an alias of {target!r}, which is no tensor")
    return Catalog(
        world_size=world_size,
        mesh=_decode_mesh(doc["mesh"], f"{what}, mesh"),
        components=components,
        layouts=layouts,
        tensors=tensors,
        aliases=aliases,
        values=values,
        per_rank=per_rank,
        parameters=_decode_parameters(doc.get("parameters", []), [*tensors], f"{what}, parameters"),
    )


def _check_names(tables: Sequence[Mapping[str, object]], what: str) -> None:
    if len(set().union(*tables)) != sum(map(len, tables)):
        ((fqn, _),) = Counter(chain.from_iterable(tables)).most_common(1)
        raise corrupt_error(what, f"{fqn!r} stands for two things")
    if max(map(len, chain.from_iterable(tables)), default=0) > MAX_FQN_CHARS:
        raise corrupt_error(what, f"a name of more than {MAX_FQN_CHARS} characters")


def _decode_mesh(value: Json, what: str) -> tuple[tuple[str, int], ...]:
    # After a reshard it is that of the ranks that saved, who may have been more than there are now.
    axes = [row(axis, 2, what) for axis in array(value, what)]
    return tuple(
        (string(name, what), integer(size, 1, MAX_WORLD_SIZE, what)) for name, size in axes
    )


def _decode_components(value: Json, what: str) -> tuple[Component, ...]:
    rows = [row(component, 2, what) for component in array(value, what)]
    components = tuple(Component(string(name, what), string(stem, what)) for name, stem in rows)
    for component in components:
        if not filenames.is_stem(component.stem):
            raise corrupt_error(what, f"{quoted(component.stem)} cannot begin a file's name")
    if len({component.stem for component in components}) != len(components):
        raise corrupt_error(what, "two components of one stem")
    return components


def _decode_holders(value: Json, world_size: int, what: str) -> list[HolderTable]:
    what = f"{what}, holders"
    single = [(rank,) for rank in range(world_size)]
    tables: list[HolderTable] = []
    num_cells = 0
    for table in array(value, what):
        if type(table) is dict:
            (each,) = fields(table, ("each",), what)
            first, count = row(each, 2, what)
            first = integer(first, 0, world_size - 1, what)
            stop = first + integer(count, 1, world_size - first, what)
            holders: HolderTable = tuple(single[first:stop])
        else:
            holders = tuple(_decode_ranks(ranks, world_size, what) for ranks in array(table, what))
        tables.append(holders)
        num_cells += len(holders)
        if num_cells > MAX_CELLS:
            raise corrupt_error(what, f"more than {MAX_CELLS} cells")
    return tables


def _decode_ranks(value: Json, world_size: int, what: str) -> tuple[int, ...]:
    ranks = integers(value, what)
    if not ranks or ranks[-1] >= world_size or any(a >= b for a, b in pairwise(ranks)):
        raise corrupt_error(what, f"{quoted(value)} is not an ascending list of ranks")
    return ranks


def _decode_layouts(value: Json, tables: list[HolderTable], what: str) -> tuple[Layout, ...]:
    layouts = []
    for number, entry in enumerate(array(value, f"{what}, layouts")):
        here = f"{what}, layout {number}"
        kinds = [kind for kind in ("grid", "flat", "regions") if kind in mapping(entry, here)]
        if len(kinds) != 1:
            raise corrupt_error(here, f"{len(kinds)} kinds of cuts, not one")
        cut, table = fields(entry, (kinds[0], "holders"), here)
        holders = tables[integer(table, 0, len(tables) - 1, f"{here}, holders")]
        decoded = _decode_cut(kinds[0], array(cut, here), here)
        if decoded.num_cells != len(holders):
            raise corrupt_error(here, f"{decoded.num_cells} cells, but {len(holders)} have holders")
        layouts.append(Layout(decoded, holders))
    return tuple(layouts)


def _decode_cut(kind: str, value: list[Json], what: str) -> Cut:
    if kind == "grid":
        cuts = tuple(integers(cut, what) for cut in value)
        if any(len(cut) < 2 for cut in cuts):
            raise corrupt_error(what, "a dimension with fewer than two cuts")
        return Grid(cuts)
    if kind == "flat":
        return Flat(integers(value, what))
    return Regions(tuple(decode_region(region, what) for region in value))


def _decode_parameters(value: Json, names: Sequence[str], what: str) -> dict[str, bool]:
    parameters: dict[str, bool] = {}
    free = 0
    for run in array(value, what):
        start, count, trainable = row(run, 3, what)
        first = integer(start, free, len(names) - 1, what)
        free = first + integer(count, 1, len(names) - first, what)
        if type(trainable) is not bool:
            raise corrupt_error(what, f"{quoted(trainable)} is not true or false")
        parameters.update(dict.fromkeys(names[first:free], trainable))
    return parameters


def _decode_per_rank(value: Json, world_size: int, what: str) -> tuple[tuple[Key, int], ...]:
    rows = [row(entry, 2, what) for entry in array(value, what)]
    keys = tuple(
        (_decode_key(key, what, 0), integer(rank, 0, world_size - 1, what)) for key, rank in rows
    )
    if not keys or len({key for key, _ in keys}) != len(keys):
        raise corrupt_error(what, "no key, or the same key twice")
    return keys


def _decode_key(value: Json, what: str, depth: int) -> Key:
    if type(value) is list and depth < MAX_KEY_DEPTH:
        return tuple(_decode_key(part, what, depth + 1) for part in value)
    if type(value) is int or type(value) is str:
        return value
    raise corrupt_error(what, f"{quoted(value)} is no key")


# --- tensors ---------------------------------------------------------------------------------


def _decode_tensors(
    text: bytes, layouts: Sequence[Layout], num_components: int, what: str
) -> dict[str, TensorRecord]:
    fits: set[tuple[int, Shape | int]] = set()

    def record(facts: Json, what: str) -> TensorRecord:
        code, sizes, number, turn, part = row(facts, 5, what)
        dtype = decode_dtype(code, what)
        shape = decode_shape(sizes, dtype, what)
        layout = integer(number, 0, len(layouts) - 1, f"{what}, layout")
        rotation = integer(turn, 0, MAX_WORLD_SIZE, f"{what}, rotation")
        component = integer(part, 0, num_components - 1, f"{what}, component")
        cut = layouts[layout].cut
        # Each pair is checked once. A flat cut fits every shape of so many elements; the others
        # fit one shape.
        pair = (layout, prod(shape) if isinstance(cut, Flat) else shape)
        if pair not in fits:
            try:
                check_cut(cut, shape)
            except ValueError as error:
                raise corrupt_error(what, str(error)) from None
            fits.add(pair)
        return TensorRecord(dtype.name, shape, layout, rotation, component)

    rows = strict_json.members(text, f"{what}, tensors")
    examples = {one: fqn for fqn, one in rows.items()}
    records = {
        one: record(facts, f"{what}, {examples[one]!r}")
        for one, facts in strict_json.parse_each(rows.values(), f"{what}, tensors").items()
    }
    return {fqn: records[one] for fqn, one in rows.items()}
