"""Decide which modules convert their own state in a load. Pure.

A class that has changed the form of its state converts older state in `_load_from_state_dict`, or
in a hook. Its tensors cannot be filled in place: they are read into staging of the saved shapes,
and the module loads that. A part of a tensor cannot be converted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from dist_ckpt.core.format.strict_json import Json
from dist_ckpt.core.planning.module_versions import encode_metadata, modules_above, version_of_entry
from dist_ckpt.core.planning.name_selection import names_above
from dist_ckpt.core.state.module_tensors import Converter

# The saved metadata of a module by its path; None if it is unknown, {} if it has none.
SavedMetadata = Callable[[str], dict[str, Json] | None]


@dataclass(frozen=True, slots=True)
class ConversionDecision:
    """The modules of a model that convert saved state, by their paths.

    - `staged`: modules of another version than the saved one.
    - `renaming`: modules that may convert state with other names or shapes.
    - `refused`: modules of `staged` that have only parts of their tensors.
    - `newer`: modules that were saved by a newer version of their class.
    - `unknown`: modules that may convert state, but whose saved version is unknown.
    """

    staged: frozenset[str]
    renaming: frozenset[str]
    refused: tuple[str, ...]
    newer: tuple[str, ...]
    unknown: tuple[str, ...]


def decide_conversion(
    converters: Mapping[str, Converter],
    live: Mapping[str, Mapping[str, object]],
    saved: SavedMetadata,
    *,
    mismatches: Collection[str],
    cut: Collection[str],
) -> ConversionDecision:
    """Decide how each module loads. In place is the default.

    `live` has the metadata of the modules of the state. `mismatches` are missing and unexpected
    names, and those of other shapes. `cut` are names of which this rank may have only a part.
    """
    with_mismatches, with_cuts = _with_parents(mismatches), _with_parents(cut)
    staged, renaming = set[str](), set[str]()
    refused, newer, unknown = list[str](), list[str](), list[str]()
    for path, converter in converters.items():
        is_cut = path in with_cuts
        if path in with_mismatches and not is_cut:
            renaming.add(path)
        if converter.by_names:
            continue
        paths: tuple[str, ...] = (path,)
        if converter.overrides_load:
            paths = tuple(p for p in live if p not in converters or not converters[p].by_names)
        pairs = [(saved(below), live[below]) for below in paths if below in live]
        known = [(metadata, module) for metadata, module in pairs if metadata is not None]
        if len(known) < len(pairs):
            unknown.append(path)
            continue
        versions = [(_version(metadata), _version(module)) for metadata, module in known]
        if any(before > now for before, now in versions):
            newer.append(path)
        is_older = any(before < now for before, now in versions)
        if is_cut and is_older:
            refused.append(path)
        elif not is_cut and (is_older or _differ(known, converter)):
            staged.add(path)
    return ConversionDecision(
        frozenset(staged), frozenset(renaming), tuple(refused), tuple(newer), tuple(unknown)
    )


def is_in(name: str, modules: Collection[str]) -> bool:
    """Return True if a name is in one of the modules, given by their paths."""
    return "" in modules or any(above in modules for above in names_above(name))


def _with_parents(names: Collection[str]) -> set[str]:
    return {"", *modules_above(names)} if names else set()


def _differ(
    pairs: Sequence[tuple[Mapping[str, object], Mapping[str, object]]], converter: Converter
) -> bool:
    """Return True if saved and live metadata differ.

    Wrappers have their own `load_state_dict`, which converts nothing. So for a root with its own
    one, state without any metadata, as in safetensors files, counts as the first version.
    """
    if converter.overrides_load and not any(saved for saved, _ in pairs):
        return False
    return any(encode_metadata(saved) != encode_metadata(live) for saved, live in pairs)


def _version(metadata: Mapping[str, object]) -> int:
    # Without metadata the first version is assumed.
    return max(version_of_entry(encode_metadata(metadata)), 1)
