"""How many parameters a checkpoint's model has: counted from its catalog, never told by a user."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod

from dist_ckpt.core.format.index.index import Catalog
from dist_ckpt.core.format.layout import check_shape
from dist_ckpt.core.state.tree.containers import RECORD, join, whole_of
from dist_ckpt.errors import CorruptError


@dataclass(frozen=True, slots=True)
class ParameterCounts:
    """How many elements the parameters have, and those of them that are trained; tied ones once."""

    num_parameters: int
    num_trainable: int


def count_parameters(
    catalog: Catalog, value_of: Callable[[str], object], component: str | None = None
) -> ParameterCounts | None:
    """Count the parameters, of one component or of all; None where it is not known which they are.

    A quantized one counts as the whole that it stands for, whose shape is in the plain value that
    `value_of` returns by its name. CorruptError if that is no shape.
    """
    wholes: dict[str, tuple[int, bool]] = {}
    for fqn, trainable in catalog.parameters.items():
        record = catalog.tensors[fqn]
        if component not in (None, catalog.components[record.component].name):
            continue
        if (whole := whole_of(fqn, catalog.values)) is None:
            wholes[fqn] = prod(record.shape), trainable
        elif whole not in wholes:
            wholes[whole] = _numel_of(whole, value_of(join(whole, RECORD))), trainable
    if not wholes:
        return None
    counts = list(wholes.values())
    return ParameterCounts(
        sum(numel for numel, _ in counts), sum(numel for numel, trains in counts if trains)
    )


def _numel_of(whole: str, record: object) -> int:
    shape = record.get("shape") if isinstance(record, Mapping) else None
    try:
        if not (isinstance(shape, list | tuple) and all(type(n) is int and n >= 0 for n in shape)):
            raise ValueError("not one of whole numbers")
        check_shape(tuple(shape), 1)
    except ValueError as error:
        raise CorruptError(f"{whole} is no tensor: its shape {shape!r}: {error}") from None
    return prod(shape)
