"""The catalog as JSON: which tensors, values and files a checkpoint has, and who stored them.

A decoded catalog is valid: numbers are in range, names unique, and layouts tile their tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import chain, pairwise
from math import prod

from dist_ckpt.core.format import filenames, strict_json
from dist_ckpt.core.format.geometry import Cut, Flat, Grid, Layout, Regions, Shape, check_cut
from dist_ckpt.core.format.index.index import MAX_KEY_DEPTH, Catalog, Component, Key, TensorRecord
from dist_ckpt.core.format.strict_json import (
    Json,
    array,
    boolean,
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

# Limit for all tables of holders: a short document can request many cells.
MAX_CELLS = 1 << 24

HolderTable = tuple[tuple[int, ...], ...]


# --- encoding --------------------------------------------------------------------------------


class EncodedCatalog:
    """The fields of a catalog as text, built once for all indexes that share it.

    `was_read` is True after an index with this text was decoded to this catalog.
    """

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self.was_read = False

    @cached_property
    def fields(self) -> bytes:
        """The fields, without the braces around them. Raises ValueError if JSON lacks a value."""
        return strict_json.dump(encode_catalog(self.catalog))[1:-1]


def encode_catalog(catalog: Catalog) -> dict[str, Json]:
    """Return the fields of a catalog. Equal tables of holders are written once."""
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
            fqn: [t.dtype, list(t.shape), t.layout, t.rotation, t.component]
            for fqn, t in catalog.tensors.items()
        },
        "aliases": dict(catalog.aliases),
        "values": dict(catalog.values),
        "per_rank": {
            fqn: [[_encode_key(key), rank] for key, rank in keys]
            for fqn, keys in catalog.per_rank.items()
        },
        "parameters": [[*run] for run in runs_of(catalog.tensors, catalog.parameters)],
    }


def runs_of(
    names: Iterable[str], parameters: Mapping[str, bool]
) -> tuple[tuple[int, int, bool], ...]:
    """Return (first, count, trainable) for each run of successive names that are parameters."""
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
    # One rank for each cell, in order: the usual sharding, whose table grows with the job.
    first = holders[0][0]
    if len(holders) > 1 and holders == tuple((first + c,) for c in range(len(holders))):
        return {"each": [first, len(holders)]}
    return [list(ranks) for ranks in holders]


def _encode_key(key: Key) -> Json:
    return [_encode_key(part) for part in key] if isinstance(key, tuple) else key


# --- decoding --------------------------------------------------------------------------------


def decode_catalog(doc: Mapping[str, Json], tensors_text: bytes, label: str) -> Catalog:
    """Decode the fields of a catalog, and its tensors from text. Raises CorruptError."""
    world_size = integer(doc["world_size"], 1, MAX_WORLD_SIZE, f"{label}, world_size")
    components = _decode_components(doc["components"], f"{label}, components")
    layouts = _decode_layouts(
        doc["layouts"], _decode_holders(doc["holders"], world_size, label), label
    )
    tensors = _decode_tensors(tensors_text, layouts, len(components), label)
    aliases = {
        fqn: string(target, f"{label}, aliases")
        for fqn, target in mapping(doc["aliases"], f"{label}, aliases").items()
    }
    values = {
        fqn: integer(rank, 0, world_size - 1, f"{label}, values")
        for fqn, rank in mapping(doc["values"], f"{label}, values").items()
    }
    per_rank = {
        fqn: _decode_per_rank(keys, world_size, f"{label}, per_rank, {fqn!r}")
        for fqn, keys in mapping(doc["per_rank"], f"{label}, per_rank").items()
    }
    _check_names((tensors, aliases, values, per_rank), label)
    for fqn, target in aliases.items():
        if target not in tensors:
            raise corrupt_error(label, f"{fqn!r} is an alias of {target!r}, which is not a tensor")
    return Catalog(
        world_size=world_size,
        mesh=_decode_mesh(doc["mesh"], f"{label}, mesh"),
        components=components,
        layouts=layouts,
        tensors=tensors,
        aliases=aliases,
        values=values,
        per_rank=per_rank,
        parameters=_decode_parameters(
            doc.get("parameters", []), [*tensors], f"{label}, parameters"
        ),
    )


def _check_names(tables: Sequence[Mapping[str, object]], label: str) -> None:
    if len(set().union(*tables)) != sum(map(len, tables)):
        ((fqn, _),) = Counter(chain.from_iterable(tables)).most_common(1)
        raise corrupt_error(label, f"{fqn!r} names two things")
    if max(map(len, chain.from_iterable(tables)), default=0) > MAX_FQN_CHARS:
        raise corrupt_error(label, f"a name of more than {MAX_FQN_CHARS} characters")


def _decode_mesh(value: Json, label: str) -> tuple[tuple[str, int], ...]:
    # After a reshard the mesh is that of the original job, which may have had more ranks.
    axes = [row(axis, 2, label) for axis in array(value, label)]
    return tuple(
        (string(name, label), integer(size, 1, MAX_WORLD_SIZE, label)) for name, size in axes
    )


def _decode_components(value: Json, label: str) -> tuple[Component, ...]:
    rows = [row(component, 2, label) for component in array(value, label)]
    components = tuple(Component(string(name, label), string(stem, label)) for name, stem in rows)
    for component in components:
        if not filenames.is_stem(component.stem):
            raise corrupt_error(label, f"{quoted(component.stem)} cannot begin a file's name")
    if len({component.stem for component in components}) != len(components):
        raise corrupt_error(label, "two components with one stem")
    return components


def _decode_holders(value: Json, world_size: int, label: str) -> list[HolderTable]:
    label = f"{label}, holders"
    single = [(rank,) for rank in range(world_size)]
    tables: list[HolderTable] = []
    num_cells = 0
    for table in array(value, label):
        if type(table) is dict:
            (each,) = fields(table, ("each",), label)
            first, count = row(each, 2, label)
            first = integer(first, 0, world_size - 1, label)
            stop = first + integer(count, 1, world_size - first, label)
            holders: HolderTable = tuple(single[first:stop])
        else:
            holders = tuple(integers(ranks, label) for ranks in array(table, label))
            for ranks in holders:
                if not ranks or ranks[-1] >= world_size or any(a >= b for a, b in pairwise(ranks)):
                    raise corrupt_error(
                        label, f"{quoted([*ranks])} is not an ascending list of ranks"
                    )
        tables.append(holders)
        num_cells += len(holders)
        if num_cells > MAX_CELLS:
            raise corrupt_error(label, f"more than {MAX_CELLS} cells")
    return tables


def _decode_layouts(value: Json, tables: list[HolderTable], label: str) -> tuple[Layout, ...]:
    layouts = []
    for number, entry in enumerate(array(value, f"{label}, layouts")):
        here = f"{label}, layout {number}"
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


def _decode_cut(kind: str, value: list[Json], label: str) -> Cut:
    if kind == "grid":
        cuts = tuple(integers(cut, label) for cut in value)
        if any(len(cut) < 2 for cut in cuts):
            raise corrupt_error(label, "a dimension with fewer than two cuts")
        return Grid(cuts)
    if kind == "flat":
        return Flat(integers(value, label))
    return Regions(tuple(decode_region(region, label) for region in value))


def _decode_parameters(value: Json, names: Sequence[str], label: str) -> dict[str, bool]:
    parameters: dict[str, bool] = {}
    free = 0
    for run in array(value, label):
        start, count, trainable = row(run, 3, label)
        first = integer(start, free, len(names) - 1, label)
        free = first + integer(count, 1, len(names) - first, label)
        parameters.update(dict.fromkeys(names[first:free], boolean(trainable, label)))
    return parameters


def _decode_per_rank(value: Json, world_size: int, label: str) -> tuple[tuple[Key, int], ...]:
    rows = [row(entry, 2, label) for entry in array(value, label)]
    keys = tuple(
        (_decode_key(key, label, 0), integer(rank, 0, world_size - 1, label)) for key, rank in rows
    )
    if not keys or len({key for key, _ in keys}) != len(keys):
        raise corrupt_error(label, "no key, or the same key twice")
    return keys


def _decode_key(value: Json, label: str, depth: int) -> Key:
    if type(value) is list and depth < MAX_KEY_DEPTH:
        return tuple(_decode_key(part, label, depth + 1) for part in value)
    if type(value) is int or type(value) is str:
        return value
    raise corrupt_error(label, f"{quoted(value)} is not a key")


def _decode_tensors(
    text: bytes, layouts: Sequence[Layout], num_components: int, label: str
) -> dict[str, TensorRecord]:
    fits: set[tuple[int, Shape | int]] = set()

    def record(facts: Json, label: str) -> TensorRecord:
        code, sizes, number, turn, part = row(facts, 5, label)
        dtype = decode_dtype(code, label)
        shape = decode_shape(sizes, dtype, label)
        layout = integer(number, 0, len(layouts) - 1, f"{label}, layout")
        rotation = integer(turn, 0, MAX_WORLD_SIZE, f"{label}, rotation")
        component = integer(part, 0, num_components - 1, f"{label}, component")
        cut = layouts[layout].cut
        # Check each pair once. A flat cut fits every shape with its number of elements, another cut
        # one shape.
        pair = (layout, prod(shape) if isinstance(cut, Flat) else shape)
        if pair not in fits:
            try:
                check_cut(cut, shape)
            except ValueError as error:
                raise corrupt_error(label, str(error)) from None
            fits.add(pair)
        return TensorRecord(dtype.name, shape, layout, rotation, component)

    rows = strict_json.members(text, f"{label}, tensors")
    examples = {row_text: fqn for fqn, row_text in rows.items()}
    records = {
        row_text: record(facts, f"{label}, {examples[row_text]!r}")
        for row_text, facts in strict_json.parse_each(rows.values(), f"{label}, tensors").items()
    }
    return {fqn: records[row_text] for fqn, row_text in rows.items()}
