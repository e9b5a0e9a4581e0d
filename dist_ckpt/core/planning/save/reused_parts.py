"""Parts of components for tensors that stay what they are: files that later saves may link to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import count

from dist_ckpt.core.format.index.index import Component, TensorRecord
from dist_ckpt.core.planning.save.inventories import InventoryBody


def merged_reused(bodies: Sequence[InventoryBody]) -> frozenset[str]:
    """Return the tensors that some rank wants in files of their own, to be linked later."""
    return frozenset(fqn for body in bodies for fqn in body.inventory.reused)


def with_reused_parts(
    components: tuple[Component, ...], records: dict[str, TensorRecord], reused: frozenset[str]
) -> tuple[tuple[Component, ...], frozenset[int]]:
    """Put tensors that are to be reused into parts of their components; return which these are.

    `records` are changed. A component of which all is to be reused is not split.
    """
    fqns = [fqn for fqn in records if fqn in reused]
    whole = {records[fqn].component for fqn in fqns} - {
        record.component for fqn, record in records.items() if fqn not in reused
    }
    split = sorted({records[fqn].component for fqn in fqns} - whole)
    parts = {old: len(components) + n for n, old in enumerate(split)}
    alike: dict[TensorRecord, TensorRecord] = {}
    for fqn in fqns:
        if (part := parts.get(records[fqn].component)) is not None:
            record = replace(records[fqn], component=part)
            records[fqn] = alike.setdefault(record, record)
    return (*components, *_parts_of(components, split)), frozenset((*whole, *parts.values()))


def _parts_of(components: Sequence[Component], numbers: Iterable[int]) -> tuple[Component, ...]:
    """Return the parts of some components that are to be reused, with stems of their own."""
    taken = {component.stem for component in components}
    free = (stem for n in count() if (stem := f"r{n:02d}") not in taken)
    return tuple(Component(components[number].name, next(free)) for number in numbers)
