"""The index as bytes: one line of JSON that ends with the digest of all before it.

A decoded index is valid: numbers are in range, names unique, every layout tiles its tensors, and
every cell has a file. Later code does not check again. `docs/format.md` has the fields.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import chain, pairwise
from math import lcm, prod
from typing import TypeVar

from dist_ckpt.core.format import filenames, strict_json
from dist_ckpt.core.format.dtypes import DTYPES
from dist_ckpt.core.format.geometry import (
    MAX_NBYTES,
    Cut,
    Flat,
    Grid,
    Layout,
    Regions,
    Shape,
    check_cut,
)
from dist_ckpt.core.format.index.index import (
    MAX_ATTACHED,
    MAX_ATTACHED_NBYTES,
    MAX_KEY_DEPTH,
    MAX_STEP,
    Abandoned,
    AttachedFileRecord,
    Catalog,
    Component,
    Index,
    Key,
    ListedVersions,
    ObjectsFileRecord,
    ShardFileRecord,
    TensorRecord,
)
from dist_ckpt.core.format.index.tensor_ranges import (
    decode_fused,
    decode_parameters,
    decode_replicas,
    encode_fused,
    encode_replicas,
    parameter_ranges,
)
from dist_ckpt.core.format.objects import objects_file
from dist_ckpt.core.format.strict_json import (
    Json,
    array,
    check_version,
    corrupt_error,
    decode_dtype,
    decode_region,
    decode_shape,
    fields,
    hex_digits,
    integer,
    integers,
    mapping,
    quote,
    row,
    string,
)
from dist_ckpt.core.runtime.processes import paused_collector
from dist_ckpt.errors import CorruptError

# An index has some 100 bytes for each tensor and rank; a larger document is not one.
MAX_NBYTES_OF_INDEX = 512 << 20

# An index has at least this many values for a tensor; see `MAX_VALUES` of `strict_json`.
MIN_TENSOR_VALUES = 7

MAX_WORLD_SIZE = 1_000_000
MAX_FQN_CHARS = 4096

# Limit for all tables of holders: a short document can request many cells.
MAX_CELLS = 1 << 24

# Limit for cells when the files of all cells are computed: a short index can request many.
_MAX_LOOKUPS = 1 << 28

CATALOG_FIELDS = (
    *("world_size", "mesh", "components", "holders", "layouts"),
    *("tensors", "aliases", "values", "per_rank", "parameters", "fused", "versions", "replicas"),
)
_INDEX_FIELDS = (
    *("format", "state", "attempt", "save", "step", *CATALOG_FIELDS),
    *("files", "objects", "attached", "metadata", "saved_by", "saved_at", "digest"),
)
_ABANDONED_FIELDS = ("format", "state", "attempt", "by", "reason", "digest")

HolderTable = tuple[tuple[int, ...], ...]
D = TypeVar("D", ObjectsFileRecord, AttachedFileRecord)


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


def encode(index: Index | Abandoned, encoded_catalog: EncodedCatalog | None = None) -> bytes:
    """Return the document. Raises ValueError if JSON lacks a value."""
    try:
        if isinstance(index, Abandoned):
            doc: Json = {
                "format": strict_json.FORMAT,
                "state": "abandoned",
                "attempt": index.attempt,
                "by": index.by,
                "reason": index.reason,
            }
            body = strict_json.dump(doc).removesuffix(b"}")
        else:
            body = _index_body(index, encoded_catalog or EncodedCatalog(index.catalog))
    except ValueError as error:
        raise ValueError(
            f"the index cannot be written: {error}; use names of valid Unicode, finite numbers "
            "in metadata, and fewer tensors and per-rank values"
        ) from None
    data = strict_json.seal(body)
    if len(data) > MAX_NBYTES_OF_INDEX:
        raise ValueError(
            f"the index cannot be written: {len(data)} bytes, the limit is "
            f"{MAX_NBYTES_OF_INDEX}; save fewer tensors and per-rank values"
        )
    return data


def _index_body(index: Index, encoded: EncodedCatalog) -> bytes:
    assert encoded.catalog is index.catalog, "the text of another catalog"
    before: dict[str, Json] = {
        "format": strict_json.FORMAT,
        "state": "committed",
        "attempt": index.attempt,
        **({} if index.save is None else {"save": index.save}),
        "step": index.step,
    }
    attached: list[Json] = [[file.name, file.nbytes, file.digest] for file in index.attached]
    after: dict[str, Json] = {
        "files": [
            [file.component, file.rank, file.nbytes, file.header_nbytes, file.digest]
            for file in index.files
        ],
        "objects": [[file.name, file.nbytes, file.digest] for file in index.objects],
        **({"attached": attached} if attached else {}),
        "metadata": dict(index.metadata),
        "saved_by": dict(index.saved_by),
        "saved_at": index.saved_at,
    }
    parts = (strict_json.dump(before)[:-1], encoded.fields, strict_json.dump(after)[1:-1])
    return strict_json.check_encoded(b",".join(parts))


def encode_catalog(catalog: Catalog) -> dict[str, Json]:
    """Return the fields of a catalog. Equal tables of holders are written once."""
    tables: dict[HolderTable, int] = {}
    layouts: list[Json] = []
    for layout in catalog.layouts:
        number = tables.setdefault(layout.holders, len(tables))
        layouts.append({**_encode_cut(layout.cut), "holders": number})
    fused = encode_fused(catalog)
    known = {} if catalog.versions is None else {"versions": _encode_versions(catalog.versions)}
    replicas = encode_replicas(catalog)
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
        "parameters": [[*row] for row in parameter_ranges(catalog.tensors, catalog.parameters)],
        **({"fused": fused} if fused else {}),
        **known,
        **({"replicas": replicas} if replicas else {}),
    }


def _encode_versions(versions: Mapping[str, ListedVersions]) -> Json:
    return {model: dict(listed) for model, listed in versions.items()}


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


# --- decoding ---------------------------------------------------------------------------------


def read_back(data: bytes, encoded: EncodedCatalog, *, label: str) -> None:
    """Raise the errors of `decode` for an index. Its catalog is parsed only once."""
    index = decode(data, label=label, cached=encoded if encoded.was_read else None)
    assert isinstance(index, Index), "it was encoded from one"
    encoded.was_read = index.catalog == encoded.catalog


@paused_collector()
def decode(
    data: bytes, *, label: str = filenames.INDEX, cached: EncodedCatalog | None = None
) -> Index | Abandoned:
    """Decode the document; `label` names it in errors.

    Raises CorruptError unless it is valid and complete, IncompatibleError if it needs a newer
    dist_ckpt. If it contains the text of `cached`, that is not parsed again.
    """
    if not 0 < len(data) <= MAX_NBYTES_OF_INDEX:
        raise corrupt_error(label, f"{len(data)} bytes, not 1 to {MAX_NBYTES_OF_INDEX}")
    # Check the seal first, so that damage does not look like a newer version. If the document has
    # no seal, its version may be the reason.
    is_sealed = strict_json.check_seal(data, label)
    around = cached and _parse_around(data, cached, label)
    doc, tensors = (around, b"") if around else strict_json.parse_apart(data, "tensors", label)
    check_version(doc, label)
    if not is_sealed:
        raise corrupt_error(label, "it does not end with its digest")
    state = doc.get("state")
    if state == "abandoned":
        _, _, attempt, by, reason, _ = fields(doc, _ABANDONED_FIELDS, label)
        return Abandoned(_decode_attempt(attempt, label), string(by, label), string(reason, label))
    if state != "committed":
        raise corrupt_error(label, f"state {quote(state)} is neither committed nor abandoned")
    # Before 2026-12 there was no `save`, `parameters`, `fused`, `versions` or `replicas`.
    absent: dict[str, Json] = {"save": None, "parameters": [], "fused": [], "attached": []}
    fields({**absent, "versions": None, "replicas": {}, **doc}, _INDEX_FIELDS, label)
    catalog = cached.catalog if cached and around else decode_catalog(doc, tensors, label)
    return _decode_index(doc, catalog, label)


def _parse_around(data: bytes, cached: EncodedCatalog, label: str) -> dict[str, Json] | None:
    """Parse the fields around those of a cached catalog, which become None. Return None on failure.

    Two objects are parsed, so that the catalog's text can only be fields of the document itself.
    """
    before, _, after = data.partition(b",%s," % cached.fields)
    try:
        first = mapping(strict_json.parse(before + b"}", label), label)
        last = mapping(strict_json.parse(b"{" + after, label), label)
    except CorruptError:
        return None
    doc = {**first, **dict.fromkeys(CATALOG_FIELDS), **last}
    # `{,"world_size"` is invalid JSON, and a key that occurs twice is damage.
    return doc if first and len(doc) == len(first) + len(CATALOG_FIELDS) + len(last) else None


def _decode_index(doc: Mapping[str, Json], catalog: Catalog, label: str) -> Index:
    step, saved_at = doc["step"], doc["saved_at"]
    index = Index(
        attempt=_decode_attempt(doc["attempt"], label),
        save=hex_digits(doc["save"], 32, f"{label}, save") if "save" in doc else None,
        step=None if step is None else integer(step, 0, MAX_STEP, f"{label}, step"),
        catalog=catalog,
        files=_decode_files(doc["files"], catalog, f"{label}, files"),
        objects=_decode_file_records(
            doc["objects"], ObjectsFileRecord, objects_file.MAX_NBYTES, f"{label}, objects"
        ),
        attached=_decode_attached(doc.get("attached", []), f"{label}, attached"),
        metadata=mapping(doc["metadata"], f"{label}, metadata"),
        saved_by={
            key: string(value, f"{label}, saved_by")
            for key, value in mapping(doc["saved_by"], f"{label}, saved_by").items()
        },
        saved_at=strict_json.number(saved_at, f"{label}, saved_at"),
    )
    _check_shard_files(index, label)
    _check_objects_files(index, label)
    return index


def _decode_attempt(value: Json, label: str) -> str:
    name = string(value, f"{label}, attempt")
    if filenames.parse_attempt(name) is None:
        raise corrupt_error(label, f"{quote(name)} is not an attempt's name")
    return name


# --- files ------------------------------------------------------------------------------------


def _decode_files(value: Json, catalog: Catalog, label: str) -> tuple[ShardFileRecord, ...]:
    files = []
    for entry in array(value, label):
        component, rank, nbytes, header_nbytes, digest = row(entry, 5, label)
        size = integer(nbytes, 0, MAX_NBYTES, label)
        files.append(
            ShardFileRecord(
                integer(component, 0, len(catalog.components) - 1, label),
                integer(rank, 0, catalog.world_size - 1, label),
                size,
                integer(header_nbytes, 0, size, label),
                hex_digits(digest, 32, label),
            )
        )
    return tuple(files)


def _decode_file_records(value: Json, cls: type[D], max_nbytes: int, label: str) -> tuple[D, ...]:
    files = []
    for entry in array(value, label):
        name, nbytes, digest = row(entry, 3, label)
        size = integer(nbytes, 0, max_nbytes, label)
        files.append(cls(string(name, label), size, hex_digits(digest, 32, label)))
    return tuple(files)


def _decode_attached(value: Json, label: str) -> tuple[AttachedFileRecord, ...]:
    files = _decode_file_records(value, AttachedFileRecord, MAX_ATTACHED_NBYTES, label)
    if bad := [file.name for file in files if not filenames.is_attached_name(file.name)]:
        raise corrupt_error(label, f"{quote(bad[0])} is not the name of an attached file")
    # Some file systems ignore case in names.
    if len({file.name.lower() for file in files}) != len(files):
        raise corrupt_error(label, "a name is listed twice, or in upper and lower case")
    if len(files) > MAX_ATTACHED or sum(file.nbytes for file in files) > MAX_ATTACHED_NBYTES:
        raise corrupt_error(label, f"more than {MAX_ATTACHED} files or {MAX_ATTACHED_NBYTES} bytes")
    return files


def _check_shard_files(index: Index, label: str) -> None:
    """Check that exactly the files with cells are listed, with the bytes that their cells need."""
    catalog = index.catalog
    files = [(file.component, file.rank) for file in index.files]
    counts = catalog.counts()
    needed = _find_needed_files(catalog, [record for record, _ in counts], len(files), label)
    if len(set(files)) != len(files):
        raise corrupt_error(label, "a shard file is listed twice")
    if wrong := needed.symmetric_difference(files):
        component, rank = min(wrong)
        name = filenames.shard_file(catalog.components[component].stem, rank)
        fact = "holds shards but is not listed" if (component, rank) in needed else "holds nothing"
        raise corrupt_error(label, f"{name} {fact}")
    stored = [0] * len(catalog.components)
    for file in index.files:
        stored[file.component] += file.nbytes - file.header_nbytes
    for tensor, count in counts:
        stored[tensor.component] -= count * prod(tensor.shape) * DTYPES[tensor.dtype].itemsize
    if excess := max(stored, key=abs, default=0):
        raise corrupt_error(label, f"its files are {excess} bytes too large for its tensors")


def _find_needed_files(
    catalog: Catalog, records: Iterable[TensorRecord], num_files: int, label: str
) -> set[tuple[int, int]]:
    """Return (component, rank) of each file that stores a cell; stop above `num_files`."""
    needed: set[tuple[int, int]] = set()
    # The holders that store depend on the rotation modulo the period of all lists of holders.
    periods = [lcm(*{len(ranks) for ranks in layout.holders}) for layout in catalog.layouts]
    turns = {(t.component, t.layout, t.rotation % periods[t.layout]) for t in records}
    num_lookups = 0
    for component, layout, rotation in turns:
        holders = catalog.layouts[layout].holders
        num_lookups += len(holders)
        if num_lookups > _MAX_LOOKUPS:
            raise corrupt_error(label, f"more than {_MAX_LOOKUPS} cells to look up")
        if len(needed) > num_files:
            break
        needed.update(
            (component, ranks[(cell + rotation) % len(ranks)]) for cell, ranks in enumerate(holders)
        )
    return needed


def _check_objects_files(index: Index, label: str) -> None:
    """Check that exactly the files with values are listed, and maybe the global one."""
    names = {file.name for file in index.objects}
    if len(names) != len(index.objects):
        raise corrupt_error(label, "an objects file is listed twice")
    # `list_contents` would make a decode 25 % longer with four per-rank values of 16,384 ranks.
    ranks = {rank for keys in index.catalog.per_rank.values() for _, rank in keys}
    needed = {filenames.objects_file(rank) for rank in ranks}
    for rank in {*index.catalog.values.values()}:
        needed.add(filenames.objects_file(rank) if rank else filenames.OBJECTS)
    if missing := sorted(needed - names):
        raise corrupt_error(label, f"{missing[0]} holds values but is not listed")
    if extra := sorted(names - needed - {filenames.OBJECTS}):
        raise corrupt_error(label, f"{quote(extra[0])} holds nothing")


# --- catalog ----------------------------------------------------------------------------------


def decode_catalog(doc: Mapping[str, Json], tensors_text: bytes, label: str) -> Catalog:
    """Decode the fields of a catalog, and its tensors from text. Raises CorruptError."""
    world_size = integer(doc["world_size"], 1, MAX_WORLD_SIZE, f"{label}, world_size")
    components = _decode_components(doc["components"], f"{label}, components")
    holders = _decode_holders(doc["holders"], world_size, label)
    layouts = _decode_layouts(doc["layouts"], holders, label)
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
        parameters=decode_parameters(doc.get("parameters", []), [*tensors], label),
        replicas=decode_replicas(doc.get("replicas", {}), (tensors, values, per_rank), label),
        fused=decode_fused(doc.get("fused", []), tensors, f"{label}, fused"),
        versions=_decode_versions(doc["versions"], label) if "versions" in doc else None,
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
    return tuple((string(n, label), integer(size, 1, MAX_WORLD_SIZE, label)) for n, size in axes)


def _decode_components(value: Json, label: str) -> tuple[Component, ...]:
    rows = [row(component, 2, label) for component in array(value, label)]
    components = tuple(Component(string(name, label), string(stem, label)) for name, stem in rows)
    for component in components:
        if not filenames.is_stem(component.stem):
            raise corrupt_error(label, f"{quote(component.stem)} cannot begin a file's name")
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
                    fact = f"{quote([*ranks])} is not an ascending list of ranks"
                    raise corrupt_error(label, fact)
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


def _decode_versions(value: Json, label: str) -> Mapping[str, ListedVersions]:
    label = f"{label}, versions"
    versions = {model: mapping(listed, label) for model, listed in mapping(value, label).items()}
    for listed in versions.values():
        for path, entry in listed.items():
            if entry is not None and type(entry) not in (int, dict):
                raise corrupt_error(label, f"{quote(path)} has {quote(entry)}, not a version")
    return versions


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
    raise corrupt_error(label, f"{quote(value)} is not a key")


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
