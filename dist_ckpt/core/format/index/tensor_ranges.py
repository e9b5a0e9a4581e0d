"""What an index says of some of its tensors: which are parameters, or fused, or differed.

Tensors are numbered in their order. Each table lists ranges of successive numbers, because equal
tensors mostly follow each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from dist_ckpt.core.format.geometry import MAX_DIMS
from dist_ckpt.core.format.index.index import Catalog, Fusion, TensorRecord
from dist_ckpt.core.format.strict_json import (
    Json,
    array,
    boolean,
    corrupt_error,
    integer,
    integers,
    mapping,
    quote,
    row,
    string,
)

V = TypeVar("V")


def parameter_ranges(
    names: Iterable[str], parameters: Mapping[str, bool]
) -> tuple[tuple[int, int, bool], ...]:
    """Return (first, count, trainable) for each range of successive names that are parameters."""
    return tuple(_ranges(names, parameters))


def _ranges(names: Iterable[str], table: Mapping[str, V]) -> list[tuple[int, int, V]]:
    """Return (first, count, value) for each range of successive names with equal values."""
    ranges: list[tuple[int, int, V]] = []
    for number, name in enumerate(names if table else ()):
        if (value := table.get(name)) is None:
            continue
        if ranges and ranges[-1][0] + ranges[-1][1] == number and ranges[-1][2] == value:
            ranges[-1] = ranges[-1][0], ranges[-1][1] + 1, value
        else:
            ranges.append((number, 1, value))
    return ranges


def encode_fused(catalog: Catalog) -> list[Json]:
    """Return the ranges of fused tensors, each with its dimension and sizes."""
    return [
        [first, count, fusion.dim, [*fusion.sizes]]
        for first, count, fusion in _ranges(catalog.tensors, catalog.fused)
    ]


def decode_parameters(value: Json, names: Sequence[str], label: str) -> dict[str, bool]:
    """Return whether each parameter is trainable. Raises CorruptError."""
    label = f"{label}, parameters"
    parameters: dict[str, bool] = {}
    free = 0
    for listed_range in array(value, label):
        start, count, trainable = row(listed_range, 3, label)
        first = integer(start, free, len(names) - 1, label)
        free = first + integer(count, 1, len(names) - first, label)
        parameters.update(dict.fromkeys(names[first:free], boolean(trainable, label)))
    return parameters


def decode_fused(value: Json, tensors: Mapping[str, TensorRecord], label: str) -> dict[str, Fusion]:
    """Return the pieces of each fused tensor. Raises CorruptError."""
    names, free, fused = [*tensors], 0, dict[str, Fusion]()
    for listed_range in array(value, label):
        start, count, dim, sizes = row(listed_range, 4, label)
        first = integer(start, free, len(names) - 1, label)
        free = first + integer(count, 1, len(names) - first, label)
        fusion = Fusion(integer(dim, 0, MAX_DIMS, label), integers(sizes, label))
        total = sum(fusion.sizes) if all(fusion.sizes) else 0
        for fqn in names[first:free]:
            shape = tensors[fqn].shape
            if not total or shape[fusion.dim : fusion.dim + 1] != (total,):
                raise corrupt_error(label, f"{fqn!r} of shape {[*shape]} has no such pieces")
            fused[fqn] = fusion
    return fused


def encode_replicas(catalog: Catalog) -> dict[str, Json]:
    """Return the rule of each name that the catalog has."""
    names = {*catalog.names} if catalog.replicas else set[str]()
    return {fqn: rule for fqn, rule in catalog.replicas.items() if fqn in names}


def decode_replicas(
    value: Json, tables: tuple[Mapping[str, object], ...], label: str
) -> dict[str, str]:
    """Return the rule of each name. `tables`: tensors, values, per-rank values. CorruptError."""
    tensors, values, per_rank = tables
    rules: dict[str, str] = {}
    if value == {}:
        return rules
    names = {"rank0": {*tensors, *values}, "mean": {*tensors}, "per_rank": {*per_rank}}
    for fqn, rule in mapping(value, f"{label}, replicas").items():
        if fqn not in names.get(string(rule, f"{label}, replicas"), ()):
            raise corrupt_error(label, f"replicas gives {quote(rule)} to {fqn!r}")
        rules[fqn] = str(rule)
    return rules
