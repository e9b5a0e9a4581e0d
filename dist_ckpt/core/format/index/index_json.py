"""The index as bytes: one line of JSON that ends with the digest of all before it.

A decoded index is valid: numbers are in range, every layout tiles its tensors, and every cell has a
file. Later code does not check again. `docs/format.md` has the fields.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from math import lcm, prod
from typing import TypeVar

from dist_ckpt.core.format import filenames, strict_json
from dist_ckpt.core.format.dtypes import DTYPES
from dist_ckpt.core.format.geometry import MAX_NBYTES
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

# An index has some 100 bytes for each tensor and rank; a larger document is not one.
MAX_NBYTES_OF_INDEX = 512 << 20

# Limit for cells when the files of all cells are computed: a short index can request many.
_MAX_LOOKUPS = 1 << 28

_INDEX_FIELDS = (
    *("format", "state", "attempt", "save", "step", *CATALOG_FIELDS),
    *("files", "objects", "attached", "metadata", "saved_by", "saved_at", "digest"),
)
_ABANDONED_FIELDS = ("format", "state", "attempt", "by", "reason", "digest")

D = TypeVar("D", ObjectsFileRecord, AttachedFileRecord)


# --- encoding --------------------------------------------------------------------------------


def encode(index: Index | Abandoned, text: EncodedCatalog | None = None) -> bytes:
    """Return the document. Raises ValueError if JSON lacks a value. `text` encodes the catalog."""
    try:
        if isinstance(index, Abandoned):
            doc: dict[str, Json] = {
                "format": {"version": VERSION, "requires": []},
                "state": "abandoned",
                **asdict(index),
            }
            body = strict_json.dump(doc).removesuffix(b"}")
        else:
            body = _index_body(index, text or EncodedCatalog(index.catalog))
    except ValueError as error:
        raise ValueError(
            f"the index cannot be written: {error}; use names of valid Unicode, finite numbers "
            "in metadata, and fewer tensors and per-rank values"
        ) from None
    data = strict_json.sealed(body)
    if len(data) > MAX_NBYTES_OF_INDEX:
        raise ValueError(
            f"the index cannot be written: {len(data)} bytes, the limit is "
            f"{MAX_NBYTES_OF_INDEX}; save fewer tensors and per-rank values"
        )
    return data


def _index_body(index: Index, text: EncodedCatalog) -> bytes:
    assert text.catalog is index.catalog, "the text of another catalog"
    before: dict[str, Json] = {
        "format": {"version": VERSION, "requires": []},
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
    parts = (strict_json.dump(before)[:-1], text.fields, strict_json.dump(after)[1:-1])
    return strict_json.checked(b",".join(parts))


# --- decoding --------------------------------------------------------------------------------


def read_back(data: bytes, text: EncodedCatalog, *, label: str) -> None:
    """Raise the errors of `decode` for an index. The `text` of its catalog is parsed only once."""
    index = decode(data, label=label, cached=text if text.was_read else None)
    assert isinstance(index, Index), "it was encoded from one"
    text.was_read = index.catalog == text.catalog


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
        return Abandoned(_attempt(attempt, label), string(by, label), string(reason, label))
    if state != "committed":
        raise corrupt_error(label, f"state {quoted(state)} is neither committed nor abandoned")
    # Before 2026-12 there was no `save` and no `parameters`; `attached` is optional.
    fields({"save": None, "parameters": [], "attached": [], **doc}, _INDEX_FIELDS, label)
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
        attempt=_attempt(doc["attempt"], label),
        save=hex_digits(doc["save"], 32, f"{label}, save") if "save" in doc else None,
        step=None if step is None else integer(step, 0, MAX_STEP, f"{label}, step"),
        catalog=catalog,
        files=_decode_files(doc["files"], catalog, f"{label}, files"),
        objects=_decode_documents(
            doc["objects"], ObjectsFileRecord, objects_file.MAX_NBYTES, f"{label}, objects"
        ),
        attached=_decode_attached(doc.get("attached", []), f"{label}, attached"),
        metadata=mapping(doc["metadata"], f"{label}, metadata"),
        saved_by={
            key: string(value, f"{label}, saved_by")
            for key, value in mapping(doc["saved_by"], f"{label}, saved_by").items()
        },
        saved_at=number(saved_at, f"{label}, saved_at"),
    )
    _check_shard_files(index, label)
    _check_objects_files(index, label)
    return index


def _attempt(value: Json, label: str) -> str:
    name = string(value, f"{label}, attempt")
    if filenames.parse_attempt(name) is None:
        raise corrupt_error(label, f"{quoted(name)} is not an attempt's name")
    return name


# --- files -----------------------------------------------------------------------------------


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


def _decode_documents(value: Json, cls: type[D], max_nbytes: int, label: str) -> tuple[D, ...]:
    files = []
    for entry in array(value, label):
        name, nbytes, digest = row(entry, 3, label)
        size = integer(nbytes, 0, max_nbytes, label)
        files.append(cls(string(name, label), size, hex_digits(digest, 32, label)))
    return tuple(files)


def _decode_attached(value: Json, label: str) -> tuple[AttachedFileRecord, ...]:
    files = _decode_documents(value, AttachedFileRecord, MAX_ATTACHED_NBYTES, label)
    if bad := [file.name for file in files if not filenames.is_attached_name(file.name)]:
        raise corrupt_error(label, f"{quoted(bad[0])} is not the name of an attached file")
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
    needed = _files_of(catalog, [record for record, _ in counts], len(files), label)
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
    if any(stored):
        raise corrupt_error(
            label, f"its files are {max(stored, key=abs)} bytes too large for its tensors"
        )


def _files_of(
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
    needed = set(objects_file.contents_of(index.catalog))
    if missing := sorted(needed - names):
        raise corrupt_error(label, f"{missing[0]} holds values but is not listed")
    if extra := sorted(names - needed - {filenames.OBJECTS}):
        raise corrupt_error(label, f"{quoted(extra[0])} holds nothing")
