"""Which tensors are averaged, and whether all sources have them. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from dist_ckpt.core.format.index.index import Catalog
from dist_ckpt.core.planning.selection import Selection
from dist_ckpt.core.state.tree.containers import whole_of
from dist_ckpt.errors import IncompatibleError, listed

# What is averaged: the dtype of its elements, and that of their sum. A complex number is two of
# them.
SUMS: Mapping[str, tuple[str, str]] = {
    "float64": ("float64", "float64"),
    "float32": ("float32", "float32"),
    "float16": ("float16", "float32"),
    "bfloat16": ("bfloat16", "float32"),
    "complex128": ("float64", "float64"),
    "complex64": ("float32", "float32"),
    "complex32": ("float16", "float32"),
    "float8_e4m3fn": ("float8_e4m3fn", "float32"),
    "float8_e5m2": ("float8_e5m2", "float32"),
    "float8_e4m3fnuz": ("float8_e4m3fnuz", "float32"),
    "float8_e5m2fnuz": ("float8_e5m2fnuz", "float32"),
}


def averaged_names(catalogs: Sequence[tuple[str, Catalog]], selection: Selection) -> frozenset[str]:
    """Return the tensors that are averaged: the trainable ones, or what is selected.

    `catalogs` are the sources' with their paths, the newest last; the names are its own. Raises
    ValueError if nothing can be chosen, IncompatibleError with all that differs between sources.
    """
    path, newest = catalogs[-1]
    chosen = _chosen(path, newest, selection)
    _check_matched(path, newest, selection)
    _check_parts(path, newest, chosen)
    if not chosen:
        floating = any(_is_floating(newest, name) for name in newest.tensors)
        what = "is chosen: give other patterns" if floating else "is there: nothing to average"
        raise ValueError(f"{path}: no floating-point tensor that could be averaged {what}")
    problems = [
        f"{other}: {problem}"
        for other, catalog in catalogs[:-1]
        for problem in _differences(newest, chosen, catalog, _chosen(other, catalog, selection))
    ]
    if problems:
        raise IncompatibleError(
            f"what is averaged differs from the newest, {path}: {listed(problems, '; ')}. Average "
            f"checkpoints of one model, or choose tensors with include= and exclude="
        )
    return frozenset(chosen)


def _chosen(path: str, catalog: Catalog, selection: Selection) -> set[str]:
    """Return what one checkpoint would have averaged, under the names of its tensors."""
    floating = {name for name in catalog.tensors if _is_floating(catalog, name)}
    if floating and selection.include is None:
        if not catalog.parameters:
            raise ValueError(
                f"{path} does not say which tensors are trainable, as it was saved from a plain "
                f'state_dict or by an older dist_ckpt: choose them, such as include="model.*"'
            )
        # Parts of compounds are none that could be averaged, whatever their dtype: to be refused.
        trainable = {name for name, is_trainable in catalog.parameters.items() if is_trainable}
        parts = {name for name in trainable if whole_of(name, catalog.values)}
        floating = floating & trainable | parts & catalog.tensors.keys()
    names = {name: [name] for name in floating}
    for alias, name in catalog.aliases.items():
        names.setdefault(name, []).append(alias)
    return {name for name in floating if any(one in selection for one in names[name])}


def _is_floating(catalog: Catalog, name: str) -> bool:
    return catalog.tensors[name].dtype in SUMS


def _check_matched(path: str, catalog: Catalog, selection: Selection) -> None:
    names = [name for name in catalog.tensors if _is_floating(catalog, name)]
    names += [alias for alias, name in catalog.aliases.items() if _is_floating(catalog, name)]
    if problems := selection.unmatched(names):
        raise ValueError(
            f"among the floating-point tensors of {path}: {listed(problems, '; ')} "
            f"(`dist-ckpt tree` shows the names)"
        )


def _check_parts(path: str, catalog: Catalog, chosen: set[str]) -> None:
    wholes = {whole for name in chosen if (whole := whole_of(name, catalog.values)) is not None}
    if wholes:
        raise ValueError(
            f"{path}: {listed(sorted(wholes))} "
            f"{'is a tensor' if len(wholes) == 1 else 'are tensors'} made of others (quantized), "
            f"whose parts have no average: take the newest's with exclude={min(wholes)!r}, or "
            f"average before quantizing"
        )


def _differences(
    newest: Catalog, chosen: set[str], other: Catalog, others: set[str]
) -> Iterator[str]:
    """Say what another source has otherwise of what is averaged."""
    for name in sorted(chosen):
        stored = other.aliases.get(name, name)
        record, expected = other.tensors.get(stored), newest.tensors[name]
        if record is None:
            yield f"it lacks {name}"
        elif (record.dtype, record.shape) != (expected.dtype, expected.shape):
            yield (
                f"{name} is {record.dtype} {list(record.shape)}, there "
                f"{expected.dtype} {list(expected.shape)}"
            )
        elif stored not in others:
            yield f"{name} is not trainable"
    for alias, name in newest.aliases.items():
        tied = other.aliases.get(alias, alias) == other.aliases.get(name, name)
        if name in chosen and alias in {*other.tensors, *other.aliases} and not tied:
            yield f"{alias} is not tied to {name}"
    tied_to = {name: alias for alias, name in other.aliases.items()}
    for name in sorted(others):
        # A tensor may have another of its names there.
        if {name, newest.aliases.get(name), tied_to.get(name)}.isdisjoint(chosen):
            where = "is averaged only there" if name in newest.tensors else "is only there"
            yield f"{name} {where}"
