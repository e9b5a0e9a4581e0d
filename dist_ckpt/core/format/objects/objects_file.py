"""Objects files: the values that are not tensors, and the tree that names them.

Rank 0's file is global: the tree, rank 0's values and the metadata. Another rank's file has only
what that rank stores: values that rank 0 lacks, and per-rank values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dist_ckpt.core.format import filenames
from dist_ckpt.core.format.index.index import JOINED, WHOLE, Catalog, Key, Node
from dist_ckpt.core.format.objects.plain_codec import decode_value, encode_value, expect
from dist_ckpt.core.format.objects.plain_types import Placeholder, cost_of
from dist_ckpt.core.format.strict_json import (
    FORMAT,
    MAX_INTEGER,
    MIN_INTEGER,
    Json,
    check_version,
    corrupt_error,
    fields,
    mapping,
    max_memory,
    memory_problem,
    quote,
)
from dist_ckpt.errors import IncompatibleError

# A file is read, checked and decoded as a whole. Larger data belongs in tensors.
MAX_NBYTES = 1 << 30

# Levels around a value: the document, the field, the name, and for per-rank values rows and row.
_NUM_LEVELS_AROUND = 5

# The limit of paths to one container: ranks may cut its name at different dots.
_MAX_PATHS = 64

_FIELDS = (
    *("format", "tree", "values", "per_rank", "numpy", "metadata", "objects", "text_keys"),
    "uncut",
)
_UNCUT = frozenset({WHOLE, JOINED})


@dataclass(frozen=True, slots=True)
class ObjectsFile:
    """The content of an objects file: plain values, and per-rank values by key, by fqn.

    `numpy` lists the tensors that were numpy arrays. `metadata` is the user's. `objects` has the
    names of objects whose `state_dict` was saved. Files from before 2026-12 have none. With
    `has_text_keys`, DCP has made text of all keys, and "dict" of all mappings.

    `uncut` has tensors of optimizers that were not cut with their parameter: `WHOLE` on every rank
    of a DTensor, or `JOINED` by a rule of tensors that may each have a meaning on one rank only.
    """

    tree: tuple[Node, ...] = ()
    values: Mapping[str, object] = field(default_factory=dict)
    per_rank: Mapping[str, Mapping[Key, object]] = field(default_factory=dict)
    numpy: tuple[str, ...] = ()
    metadata: Mapping[str, object] = field(default_factory=dict)
    objects: tuple[str, ...] = ()
    has_text_keys: bool = False
    uncut: Mapping[str, str] = field(default_factory=dict)


def encode(file: ObjectsFile) -> bytes:
    """Return a file's bytes. Raises TypeError or ValueError for values that are not plain data."""
    doc: dict[str, Any] = {
        "format": FORMAT,
        "tree": [[node.fqn, node.kind, list(node.keys)] for node in file.tree],
        "values": dict(file.values),
        "per_rank": {
            fqn: [[key, value] for key, value in values.items()]
            for fqn, values in file.per_rank.items()
        },
        "numpy": list(file.numpy),
        "metadata": dict(file.metadata),
    }
    if file.objects:
        doc["objects"] = list(file.objects)
    if file.has_text_keys:
        doc["text_keys"] = True
    if file.uncut:
        doc["uncut"] = dict(file.uncut)
    data = encode_value(doc, "objects", around=_NUM_LEVELS_AROUND)
    if len(data) > MAX_NBYTES:
        raise ValueError(
            f"one rank's plain data and per-rank values are {len(data)} bytes, the limit is "
            f"{MAX_NBYTES}: store large data as tensors"
        )
    # No value costs 200 times its bytes, so short files, as most are, need no walk.
    cost = cost_of(data, max_memory(len(data))) if len(data) * 200 > max_memory(0) else 0
    if (problem := memory_problem(len(data), cost)) is not None:
        raise ValueError(
            f"one rank's plain data and per-rank values cannot be stored: {problem}; store the "
            f"many small values of {_find_largest(doc)} as tensors, or as fewer and larger ones"
        )
    return data


def _find_largest(doc: Mapping[str, Any]) -> str:
    values: dict[str, object] = {**doc["values"], **doc["per_rank"]}
    values["the metadata"] = doc["metadata"]
    around = _NUM_LEVELS_AROUND
    encoded = {name: encode_value(value, name, around=around) for name, value in values.items()}
    return max(encoded, key=lambda name: cost_of(encoded[name], 1 << 63))


def decode(
    data: bytes,
    *,
    make: Callable[[Placeholder], object] = lambda value: value,
    label: str = filenames.OBJECTS,
) -> ObjectsFile:
    """Decode a file, with `make(placeholder)` for each value that needs torch or numpy.

    Raises CorruptError with `label`, or IncompatibleError if it needs a newer dist_ckpt.
    """
    try:
        doc: Json = decode_value(data, make=make, around=_NUM_LEVELS_AROUND)
    except (ValueError, RecursionError) as error:
        raise corrupt_error(label, str(error)) from None
    except IncompatibleError as error:
        raise IncompatibleError(f"{label}: {error}") from error
    check_version(doc, label)
    try:
        doc = {"objects": [], "text_keys": False, "uncut": {}, **mapping(doc, label)}
        _, tree, values, per_rank, numpy, metadata, objects, texts, uncut = fields(
            doc, _FIELDS, label
        )
        return ObjectsFile(
            tree=_decode_tree(tree),
            values=_decode_named(values),
            per_rank={fqn: _decode_keyed(rows) for fqn, rows in _decode_named(per_rank).items()},
            numpy=tuple(expect(fqn, str) for fqn in expect(numpy, list)),
            metadata=expect(metadata, dict),
            objects=tuple(expect(fqn, str) for fqn in expect(objects, list)),
            has_text_keys=expect(texts, bool),
            uncut={fqn: _decode_uncut(how) for fqn, how in _decode_named(uncut).items()},
        )
    except ValueError as error:
        raise corrupt_error(label, str(error)) from None


# The values of each objects file, by its name: their fqns, and the key of each per-rank value.
Contents = Mapping[str, Sequence[tuple[str, Key | None]]]


def list_contents(catalog: Catalog) -> Contents:
    """Return the contents of all objects files: there may be as many as ranks, so call it once."""
    contents: dict[str, list[tuple[str, Key | None]]] = {}
    for fqn, rank in catalog.values.items():
        name = filenames.objects_file(rank) if rank else filenames.OBJECTS
        contents.setdefault(name, []).append((fqn, None))
    for fqn, keys in catalog.per_rank.items():
        for key, rank in keys:
            contents.setdefault(filenames.objects_file(rank), []).append((fqn, key))
    return contents


def find_missing(
    file: ObjectsFile, name: str, catalog: Catalog, contents: Contents
) -> Iterator[str]:
    """Yield names that the catalog, or a container of the tree, expects and that the file lacks."""
    for fqn, key in contents.get(name, ()):
        if key is None and fqn not in file.values:
            yield fqn
        elif key is not None and key not in file.per_rank.get(fqn, {}):
            yield f"{fqn} of {key!r}"
    tables = (catalog.tensors, catalog.aliases, catalog.values, catalog.per_rank)
    nodes = {node.fqn for node in file.tree}
    for node in file.tree:
        for key in node.keys:
            fqn = _child_fqn(node, key)
            if fqn not in nodes and not any(fqn in table for table in tables):
                yield f"{fqn}, a child of {node.fqn or 'the state'}"


def _decode_named(value: Any) -> dict[str, Any]:
    return {expect(fqn, str): item for fqn, item in expect(value, dict).items()}


def _decode_uncut(value: Any) -> str:
    how: str = expect(value, str)
    if how not in _UNCUT:
        raise ValueError(f"a tensor that is {quote(how)}, not one of {sorted(_UNCUT)}")
    return how


def _decode_tree(rows: Any) -> tuple[Node, ...]:
    """Return the containers, each once, and with few paths to each.

    Ranks may reach one name on several paths, as "b.c" in "a" and "c" in "a.b". A walk follows them
    all, and in a hostile file of some kilobytes they double at each level.
    """
    nodes = tuple(map(_decode_node, expect(rows, list)))
    if len({node.fqn for node in nodes}) < len(nodes):
        raise ValueError("a container twice in its tree")
    paths = Counter({"": 1})
    for node in sorted(nodes, key=lambda node: len(node.fqn)):  # parents first
        if paths[node.fqn] > _MAX_PATHS:
            raise ValueError(f"too many paths to {node.fqn[:100]!r} in its tree")
        for key in node.keys:
            if len(child := _child_fqn(node, key)) > len(node.fqn):
                paths[child] += paths[node.fqn]
    return nodes


def _child_fqn(node: Node, key: str | int) -> str:
    return f"{node.fqn}.{key}" if node.fqn else str(key)


def _decode_node(entry: Any) -> Node:
    fqn, kind, keys = expect(entry, list)
    for key in expect(keys, list):
        if type(key) is not str and type(key) is not int:
            raise ValueError(f"a key that is a {type(key).__name__}")
    return Node(expect(fqn, str), expect(kind, str), tuple(keys))


def _decode_keyed(rows: Any) -> dict[Key, object]:
    values: dict[Key, object] = {}
    for entry in expect(rows, list):
        key, value = expect(entry, list)
        key = _decode_key(key)
        if key in values:
            raise ValueError(f"the key {key!r} twice")
        values[key] = value
    return values


def _decode_key(value: Any) -> Key:
    if type(value) is tuple:
        return tuple(map(_decode_key, value))
    if type(value) is str or (type(value) is int and MIN_INTEGER <= value <= MAX_INTEGER):
        return value
    raise ValueError(f"a key that is a {type(value).__name__}, or beyond 64 bits")
