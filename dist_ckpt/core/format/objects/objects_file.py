"""Objects files: the values that are not tensors, and the tree that names them.

Rank 0's file is the global one: the tree, its values and the metadata. Another rank's has only
what that rank stores: values that rank 0 lacks, and per-rank values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dist_ckpt.core.format import filenames
from dist_ckpt.core.format.index.index import Catalog, Key, Node
from dist_ckpt.core.format.objects.plain_codec import decode_value, encode_value
from dist_ckpt.core.format.objects.plain_types import (
    Placeholder,
    cost_of,
)
from dist_ckpt.core.format.strict_json import (
    VERSION,
    Json,
    check_version,
    corrupt_error,
    fields,
    max_memory,
    memory_problem,
)
from dist_ckpt.errors import IncompatibleError

# It is read, checked and decoded whole; data of this size belongs into tensors.
MAX_NBYTES = 1 << 30

# Levels around a value: the document, the field, the name, and for a per-rank value rows and row.
_AROUND = 5

# To one container: as many ways as ranks can have cut its name at its dots, and no more work.
_MAX_WAYS = 64

_FIELDS = ("format", "tree", "values", "per_rank", "numpy", "metadata")


@dataclass(frozen=True, slots=True)
class ObjectsFile:
    """What one objects file says.

    `values` are the plain values by fqn, lists of names among them; `per_rank` the values of each
    key by fqn; `numpy` the fqns of the tensors that were numpy arrays; `metadata` the user's.
    """

    tree: tuple[Node, ...] = ()
    values: Mapping[str, object] = field(default_factory=dict)
    per_rank: Mapping[str, Mapping[Key, object]] = field(default_factory=dict)
    numpy: tuple[str, ...] = ()
    metadata: Mapping[str, object] = field(default_factory=dict)


def encode(file: ObjectsFile) -> bytes:
    """Return a file's bytes.

    TypeError or ValueError for a value that is not plain data, ValueError if they are too many.
    """
    doc = {
        "format": {"version": VERSION, "requires": []},
        "tree": [[node.fqn, node.kind, list(node.keys)] for node in file.tree],
        "values": dict(file.values),
        "per_rank": {
            fqn: [[key, value] for key, value in values.items()]
            for fqn, values in file.per_rank.items()
        },
        "numpy": list(file.numpy),
        "metadata": dict(file.metadata),
    }
    data = encode_value(doc, "objects", around=_AROUND)
    if len(data) > MAX_NBYTES:
        raise ValueError(
            f"one rank's plain data and per-rank values are {len(data)} bytes, the limit is "
            f"{MAX_NBYTES}: store large data as tensors"
        )
    # Nothing costs 200 times its bytes: a short file, as most are, is not walked through.
    cost = cost_of(data, max_memory(len(data))) if len(data) * 200 > max_memory(0) else 0
    if (problem := memory_problem(len(data), cost)) is not None:
        raise ValueError(
            f"one rank's plain data and per-rank values cannot be stored: {problem}; store the "
            f"many small values of {_largest(doc)} as tensors, or as fewer and larger ones"
        )
    return data


def _largest(doc: Mapping[str, Any]) -> str:
    """Return the name of what takes the most memory."""
    values: dict[str, object] = {
        **doc["values"],
        **doc["per_rank"],
        "the metadata": doc["metadata"],
    }
    encoded = {name: encode_value(value, name, around=_AROUND) for name, value in values.items()}
    return max(encoded, key=lambda name: cost_of(encoded[name], 1 << 63))


def decode(
    data: bytes,
    *,
    make: Callable[[Placeholder], object] = lambda value: value,
    what: str = filenames.OBJECTS,
) -> ObjectsFile:
    """Return what a file says, with `make(stand_in)` for what needs torch or numpy.

    `what` names the file in errors: CorruptError if it is damaged, IncompatibleError if it needs a
    newer dist_ckpt.
    """
    try:
        doc: Json = decode_value(data, make=make, around=_AROUND)
    except (ValueError, RecursionError) as error:
        raise corrupt_error(what, str(error)) from None
    except IncompatibleError as error:
        raise IncompatibleError(f"{what}: {error}") from error
    check_version(doc, what)
    _, tree, values, per_rank, numpy, metadata = fields(doc, _FIELDS, what)
    return ObjectsFile(
        tree=_tree(tree, what),
        values=_named(values, what),
        per_rank={fqn: _keyed(rows, what) for fqn, rows in _named(per_rank, what).items()},
        numpy=tuple(_typed(fqn, str, what) for fqn in _typed(numpy, list, what)),
        metadata=_typed(metadata, dict, what),
    )


# The values that each objects file is to hold, by its name: their fqns, and the keys of those per
# rank, which are None of the others.
Contents = Mapping[str, Sequence[tuple[str, Key | None]]]


def contents_of(catalog: Catalog) -> Contents:
    """Return what the catalog says of all objects files: once, for it may have as many as ranks."""
    contents: dict[str, list[tuple[str, Key | None]]] = {}
    for fqn, rank in catalog.values.items():
        name = filenames.objects_file(rank) if rank else filenames.OBJECTS
        contents.setdefault(name, []).append((fqn, None))
    for fqn, keys in catalog.per_rank.items():
        for key, rank in keys:
            contents.setdefault(filenames.objects_file(rank), []).append((fqn, key))
    return contents


def missing_error(
    file: ObjectsFile, name: str, catalog: Catalog, contents: Contents
) -> Iterator[str]:
    """Yield what is not in the file of this name, though the catalog says it is.

    Also what the tree says is in a container, and is neither a container nor in the catalog.
    """
    for fqn, key in contents.get(name, ()):
        if key is None and fqn not in file.values:
            yield fqn
        elif key is not None and key not in file.per_rank.get(fqn, {}):
            yield f"{fqn} of {key!r}"
    tables = (catalog.tensors, catalog.aliases, catalog.values, catalog.per_rank)
    nodes = {node.fqn for node in file.tree}
    for node in file.tree:
        for key in node.keys:
            fqn = _child(node, key)
            if fqn not in nodes and not any(fqn in table for table in tables):
                yield f"{fqn}, a child of {node.fqn or 'the state'}"


def _typed(value: Any, cls: type, what: str) -> Any:
    if type(value) is not cls:
        raise corrupt_error(what, f"{type(value).__name__} in place of {cls.__name__}")
    return value


def _row(value: Any, length: int, what: str) -> list[Any]:
    row: list[Any] = _typed(value, list, what)
    if len(row) != length:
        raise corrupt_error(what, f"{len(row)} entries in place of {length}")
    return row


def _named(value: Any, what: str) -> dict[str, Any]:
    named: dict[str, Any] = _typed(value, dict, what)
    for fqn in named:
        _typed(fqn, str, what)
    return named


def _tree(rows: Any, what: str) -> tuple[Node, ...]:
    """Return the containers, each once, and with few ways that lead to it.

    Ranks may have one name in several ways, as "b.c" in "a" and "c" in "a.b". Who walks down comes
    to what is below on each of them: in a hostile file of some kilobytes they double at each level.
    """
    nodes = tuple(_node(entry, what) for entry in _typed(rows, list, what))
    if len({node.fqn for node in nodes}) < len(nodes):
        raise corrupt_error(what, "a container twice in its tree")
    ways = Counter({"": 1})
    for node in sorted(nodes, key=lambda node: len(node.fqn)):  # those above come first
        if ways[node.fqn] > _MAX_WAYS:
            raise corrupt_error(what, f"too many ways to {node.fqn[:100]!r} in its tree")
        for key in node.keys:
            if len(child := _child(node, key)) > len(node.fqn):
                ways[child] += ways[node.fqn]
    return nodes


def _child(node: Node, key: str | int) -> str:
    return f"{node.fqn}.{key}" if node.fqn else str(key)


def _node(entry: Any, what: str) -> Node:
    fqn, kind, keys = _row(entry, 3, what)
    for key in _typed(keys, list, what):
        if type(key) is not str and type(key) is not int:
            raise corrupt_error(what, f"a key that is a {type(key).__name__}")
    return Node(_typed(fqn, str, what), _typed(kind, str, what), tuple(keys))


def _keyed(rows: Any, what: str) -> dict[Key, object]:
    values: dict[Key, object] = {}
    for entry in _typed(rows, list, what):
        key, value = _row(entry, 2, what)
        key = _key(key, what)
        if key in values:
            raise corrupt_error(what, f"the key {key!r} twice")
        values[key] = value
    return values


def _key(value: Any, what: str) -> Key:
    if type(value) is tuple:
        return tuple(_key(part, what) for part in value)
    if type(value) is str or (type(value) is int and -(1 << 63) <= value < 1 << 64):
        return value
    raise corrupt_error(what, f"a key that is a {type(value).__name__}, or beyond 64 bits")
