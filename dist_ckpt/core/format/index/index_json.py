"""The index as bytes: one line of JSON that ends with the digest of all before it.

`docs/format.md` has the fields. What `decode` returns is whole: every number is in range, every
layout tiles its tensors, and every cell has a file. Nothing after it asks again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import lcm, prod

from dist_ckpt.core.format import filenames, strict_json
from dist_ckpt.core.format.dtypes import DTYPES
from dist_ckpt.core.format.index.catalog_json import CATALOG_FIELDS, EncodedCatalog, decode_catalog
from dist_ckpt.core.format.index.index import (
    MAX_ATTACHED,
    MAX_ATTACHED_NBYTES,
    MAX_STEP,
    Abandoned,
    AttachedFileRecord,
    Catalog,
    Index,
    ObjectsFileRecord,
    ShardFileRecord,
    TensorRecord,
)
from dist_ckpt.core.format.layout import MAX_NBYTES
from dist_ckpt.core.format.objects import objects_file
from dist_ckpt.core.format.strict_json import (
    VERSION,
    Json,
    array,
    check_version,
    corrupt_error,
    fields,
    hex_digits,
    integer,
    mapping,
    number,
    quoted,
    row,
    string,
)
from dist_ckpt.core.runtime.gc_pause import paused_collector
from dist_ckpt.errors import CorruptError

# An index is some 100 bytes a tensor and a rank; what is larger than this is none of ours.
MAX_NBYTES_OF_INDEX = 512 << 20

# Of cells, to find out which files hold any: a short index can ask for many.
_MAX_LOOKUPS = 1 << 28


_INDEX_FIELDS = (
    *("format", "state", "attempt", "save", "step", *CATALOG_FIELDS),
    *("files", "objects", "attached", "metadata", "saved_by", "saved_at", "digest"),
)
_ABANDONED_FIELDS = ("format", "state", "attempt", "by", "reason", "digest")


# --- encoding --------------------------------------------------------------------------------


def encode(index: Index | Abandoned, text: EncodedCatalog | None = None) -> bytes:
    """Return the document. ValueError if it holds text or numbers that JSON cannot.

    `text` is that of the index's catalog, if it is known.
    """
    try:
        if isinstance(index, Abandoned):
            body = strict_json.dump(_abandoned_doc(index)).removesuffix(b"}")
        else:
            body = _index_body(index, text or EncodedCatalog(index.catalog))
    except ValueError as error:
        raise ValueError(
            f"the index cannot be written: {error}; names must be valid Unicode, metadata's "
            "numbers finite, and tensors and per-rank values fewer than that"
        ) from None
    data = strict_json.sealed(body)
    if len(data) > MAX_NBYTES_OF_INDEX:
        raise ValueError(
            f"the index cannot be written: {len(data)} bytes, the limit is "
            f"{MAX_NBYTES_OF_INDEX}; save fewer tensors and per-rank values"
        )
    return data


def _abandoned_doc(abandoned: Abandoned) -> dict[str, Json]:
    return {
        "format": {"version": VERSION, "requires": []},
        "state": "abandoned",
        "attempt": abandoned.attempt,
        "by": abandoned.by,
        "reason": abandoned.reason,
    }


def _index_body(index: Index, text: EncodedCatalog) -> bytes:
    assert text.catalog is index.catalog, "the text of another catalog"
    before: dict[str, Json] = {
        "format": {"version": VERSION, "requires": []},
        "state": "committed",
        "attempt": index.attempt,
        **({} if index.save is None else {"save": index.save}),
        "step": index.step,
    }
    after: dict[str, Json] = {
        "files": [
            [file.component, file.rank, file.nbytes, file.header_nbytes, file.digest]
            for file in index.files
        ],
        "objects": [[file.name, file.nbytes, file.digest] for file in index.objects],
        **({"attached": _attached_rows(index)} if index.attached else {}),
        "metadata": dict(index.metadata),
        "saved_by": dict(index.saved_by),
        "saved_at": index.saved_at,
    }
    parts = (strict_json.dump(before)[:-1], text.fields, strict_json.dump(after)[1:-1])
    return strict_json.checked(b",".join(parts))


def _attached_rows(index: Index) -> Json:
    return [[file.name, file.nbytes, file.digest] for file in index.attached]


# --- decoding --------------------------------------------------------------------------------


def read_back(data: bytes, text: EncodedCatalog, *, what: str) -> None:
    """Raise what `decode` raises of an index that was encoded with this text.

    Where the text was read before, as this very catalog, only what stands around it is parsed.
    """
    index = decode(data, what=what, known=text if text.was_read else None)
    assert isinstance(index, Index), "it was encoded from one"
    text.was_read = index.catalog == text.catalog


@paused_collector()
def decode(
    data: bytes, *, what: str = filenames.INDEX, known: EncodedCatalog | None = None
) -> Index | Abandoned:
    """Return what the document says; `what` names it in errors.

    CorruptError unless it is a valid document, whole and undamaged; IncompatibleError if it needs
    a newer dist_ckpt. Where it has the text of a `known` catalog, which was read, it has that one.
    """
    if not 0 < len(data) <= MAX_NBYTES_OF_INDEX:
        raise corrupt_error(what, f"{len(data)} bytes, not 1 to {MAX_NBYTES_OF_INDEX}")
    # First, so that damage is not mistaken for a newer version; without it, the version may
    # explain why the end looks different.
    is_sealed = strict_json.check_seal(data, what)
    around = known and _parse_around(data, known, what)
    doc, tensors = (around, b"") if around else strict_json.parse_apart(data, "tensors", what)
    check_version(doc, what)
    if not is_sealed:
        raise corrupt_error(what, "it does not end with its digest")
    state = doc.get("state")
    if state == "abandoned":
        _, _, attempt, by, reason, _ = fields(doc, _ABANDONED_FIELDS, what)
        return Abandoned(_attempt(attempt, what), string(by, what), string(reason, what))
    if state != "committed":
        raise corrupt_error(what, f"state {quoted(state)} is neither committed nor abandoned")
    # Before 2026-12 there was no `save`, and no `parameters`; `attached` is where something is.
    fields({"save": None, "parameters": [], "attached": [], **doc}, _INDEX_FIELDS, what)
    catalog = known.catalog if known and around else decode_catalog(doc, tensors, what)
    return _decode_index(doc, catalog, what)


def _parse_around(data: bytes, known: EncodedCatalog, what: str) -> dict[str, Json] | None:
    """Parse what stands around the fields of a catalog, which are None then; None if that fails.

    As two objects: so the text between them is fields of the document itself, of no part of it.
    """
    before, _, after = data.partition(b",%s," % known.fields)
    try:
        first = mapping(strict_json.parse(before + b"}", what), what)
        last = mapping(strict_json.parse(b"{" + after, what), what)
    except CorruptError:
        return None
    doc = {**first, **dict.fromkeys(CATALOG_FIELDS), **last}
    # `{,"world_size"` is no JSON, and a key that occurs twice is damage.
    return doc if first and len(doc) == len(first) + len(CATALOG_FIELDS) + len(last) else None


def _decode_index(doc: Mapping[str, Json], catalog: Catalog, what: str) -> Index:
    step, saved_at = doc["step"], doc["saved_at"]
    index = Index(
        attempt=_attempt(doc["attempt"], what),
        save=hex_digits(doc["save"], 32, f"{what}, save") if "save" in doc else None,
        step=None if step is None else integer(step, 0, MAX_STEP, f"{what}, step"),
        catalog=catalog,
        files=_decode_files(doc["files"], catalog, f"{what}, files"),
        objects=_decode_objects(doc["objects"], f"{what}, objects"),
        attached=_decode_attached(doc.get("attached", []), f"{what}, attached"),
        metadata=mapping(doc["metadata"], f"{what}, metadata"),
        saved_by={
            key: string(value, f"{what}, saved_by")
            for key, value in mapping(doc["saved_by"], f"{what}, saved_by").items()
        },
        saved_at=number(saved_at, f"{what}, saved_at"),
    )
    _check_shard_files(index, what)
    _check_objects_files(index, what)
    return index


def _attempt(value: Json, what: str) -> str:
    name = string(value, f"{what}, attempt")
    if filenames.parse_attempt(name) is None:
        raise corrupt_error(what, f"{quoted(name)} is no name of an attempt")
    return name


# --- files -----------------------------------------------------------------------------------


def _decode_files(value: Json, catalog: Catalog, what: str) -> tuple[ShardFileRecord, ...]:
    files = []
    for entry in array(value, what):
        component, rank, nbytes, header_nbytes, digest = row(entry, 5, what)
        size = integer(nbytes, 0, MAX_NBYTES, what)
        files.append(
            ShardFileRecord(
                integer(component, 0, len(catalog.components) - 1, what),
                integer(rank, 0, catalog.world_size - 1, what),
                size,
                integer(header_nbytes, 0, size, what),
                hex_digits(digest, 32, what),
            )
        )
    return tuple(files)


def _decode_objects(value: Json, what: str) -> tuple[ObjectsFileRecord, ...]:
    files = []
    for entry in array(value, what):
        name, nbytes, digest = row(entry, 3, what)
        size = integer(nbytes, 0, objects_file.MAX_NBYTES, what)
        files.append(ObjectsFileRecord(string(name, what), size, hex_digits(digest, 32, what)))
    return tuple(files)


def _decode_attached(value: Json, what: str) -> tuple[AttachedFileRecord, ...]:
    files = []
    for entry in array(value, what):
        name, nbytes, digest = row(entry, 3, what)
        size = integer(nbytes, 0, MAX_ATTACHED_NBYTES, what)
        files.append(AttachedFileRecord(string(name, what), size, hex_digits(digest, 32, what)))
    if bad := [file.name for file in files if not filenames.is_attached_name(file.name)]:
        raise corrupt_error(what, f"{quoted(bad[0])} is no name of a file that is attached")
    # Not on every file system are two names that differ in their case two files.
    if len({file.name.lower() for file in files}) != len(files):
        raise corrupt_error(what, "a name is listed twice, or in upper and lower case")
    if len(files) > MAX_ATTACHED or sum(file.nbytes for file in files) > MAX_ATTACHED_NBYTES:
        most = f"{MAX_ATTACHED} files or {MAX_ATTACHED_NBYTES} bytes"
        raise corrupt_error(what, f"more than {most}")
    return tuple(files)


def _check_shard_files(index: Index, what: str) -> None:
    """Check that the files are exactly those that hold cells, and hold as much as these need."""
    catalog = index.catalog
    files = [(file.component, file.rank) for file in index.files]
    counts = catalog.counts()
    needed = _files_of(catalog, [record for record, _ in counts], len(files), what)
    if len(set(files)) != len(files):
        raise corrupt_error(what, "a shard file is listed twice")
    if wrong := needed.symmetric_difference(files):
        component, rank = min(wrong)
        name = filenames.shard_file(catalog.components[component].stem, rank)
        fact = "holds shards but is not listed" if (component, rank) in needed else "holds nothing"
        raise corrupt_error(what, f"{name} {fact}")
    stored = [0] * len(catalog.components)
    for file in index.files:
        stored[file.component] += file.nbytes - file.header_nbytes
    for tensor, count in counts:
        stored[tensor.component] -= count * prod(tensor.shape) * DTYPES[tensor.dtype].itemsize
    if any(stored):
        raise corrupt_error(
            what, f"its files are {max(stored, key=abs)} bytes too large for its tensors"
        )


def _files_of(
    catalog: Catalog, records: Iterable[TensorRecord], num_files: int, what: str
) -> set[tuple[int, int]]:
    """Return (component, rank) of each file that stores a cell; not all if there are too many."""
    needed: set[tuple[int, int]] = set()
    # Which holders store depends on the rotation only up to where all lists of holders repeat.
    periods = [lcm(*{len(ranks) for ranks in layout.holders}) for layout in catalog.layouts]
    turns: set[tuple[int, int, int]] = set()
    for tensor in records:
        turns.add((tensor.component, tensor.layout, tensor.rotation % periods[tensor.layout]))
    num_lookups = 0
    for component, layout, rotation in turns:
        holders = catalog.layouts[layout].holders
        num_lookups += len(holders)
        if num_lookups > _MAX_LOOKUPS:
            raise corrupt_error(what, f"more than {_MAX_LOOKUPS} cells to look up")
        if len(needed) > num_files:
            break
        needed.update(
            (component, ranks[(cell + rotation) % len(ranks)]) for cell, ranks in enumerate(holders)
        )
    return needed


def _check_objects_files(index: Index, what: str) -> None:
    """Check that every value has its file: the coordinator's values are in the global one."""
    catalog = index.catalog
    names = {file.name for file in index.objects}
    if len(names) != len(index.objects):
        raise corrupt_error(what, "an objects file is listed twice")
    ranks: Iterable[int] = {rank for keys in catalog.per_rank.values() for _, rank in keys}
    needed = {filenames.objects_file(rank) for rank in ranks}
    needed |= {
        filenames.objects_file(rank) if rank else filenames.OBJECTS
        for rank in catalog.values.values()
    }
    if missing := sorted(needed - names):
        raise corrupt_error(what, f"{missing[0]} holds values but is not listed")
    if extra := sorted(names - needed - {filenames.OBJECTS}):
        raise corrupt_error(what, f"{quoted(extra[0])} holds nothing")
