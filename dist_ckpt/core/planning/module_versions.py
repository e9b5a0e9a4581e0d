"""The versions of the modules of a state, as torch's `state_dict` has them in `_metadata`. Pure.

A module class that changes the form of its state raises its `_version`, and converts older state
while it is loaded. So a checkpoint stores the versions. An index lists the root of each model, and
each module that differs from these defaults:

- A module with a saved name below it has the version 1, that of `nn.Module`.
- A module without one has no metadata.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from math import isfinite
from typing import TypeGuard

from dist_ckpt.core.format.index.index import ListedVersions
from dist_ckpt.core.format.strict_json import MAX_INTEGER, MIN_INTEGER, Json, is_text
from dist_ckpt.core.planning.name_selection import names_above

# An entry that `load_state_dict(assign=True)` adds to the metadata that it gets.
_ADDED_BY_LOADS = "assign_to_params_buffers"

# The metadata of a module whose class sets no version.
_FIRST = {"version": 1}

# The limits of what is stored of a module besides its version.
_MAX_ITEMS = 100
_MAX_CHARS = 4096


def state_dict_metadata(state: object) -> Mapping[str, Mapping[str, object]] | None:
    """Return the versions of modules in a state dict of torch; None if it has none."""
    if type(state) is dict:  # it has no attributes
        return None
    metadata = getattr(state, "_metadata", None)
    if not isinstance(metadata, Mapping):
        return None
    return {
        path: module
        for path, module in metadata.items()
        if type(path) is str and isinstance(module, dict)
    }


def list_versions(
    metadata: Mapping[str, Mapping[str, object]], names: Iterable[str]
) -> dict[str, Json]:
    """Return the entries of an index for a model with this metadata and these saved names."""
    with_names = {"", *modules_above(names)}
    listed: dict[str, Json] = {"": None, **dict.fromkeys(with_names - metadata.keys())}
    for path, module in metadata.items():
        is_first = path in with_names and module == _FIRST  # almost all modules
        if path and (is_first or not _is_name(path)):
            continue
        entry = encode_metadata(module)
        if not path or entry != default_entry(has_names=path in with_names):
            listed[path] = entry
    return listed


def modules_above(names: Iterable[str]) -> set[str]:
    """Return the paths of all modules that names are in, without the root."""
    found: set[str] = set()
    for path in {name.rpartition(".")[0] for name in names} - {""}:
        for above in names_above(path):
            if above in found:
                break
            found.add(above)
    return found


def encode_metadata(metadata: Mapping[str, object]) -> Json:
    """Return the entry of a module: its version if it has nothing else.

    Only numbers, texts, and short lists and dicts of them are stored. Torch's own modules, with
    their hooks, have nothing else.
    """
    version = metadata.get("version")
    if len(metadata) == 1 and type(version) is int:  # almost all modules
        return version
    plain: dict[str, Json] = {
        key: value
        for key, of in metadata.items()
        if key != _ADDED_BY_LOADS and _is_name(key) and (value := _plain(of)) is not None
    }
    return version if [*plain] == ["version"] and type(version) is int else plain or None


def decode_metadata(entry: Json) -> dict[str, Json]:
    """Return the metadata of a module from its entry."""
    if isinstance(entry, dict):
        return {**entry}
    return {} if entry is None else {"version": entry}


def default_entry(*, has_names: bool) -> Json:
    """Return the entry of a module that is not listed."""
    return 1 if has_names else None


def version_of_entry(entry: Json) -> int:
    """Return the version of a module from its entry; 0 if it has none."""
    version = entry.get("version") if isinstance(entry, dict) else entry
    return version if type(version) is int else 0


def merge_versions(models: Iterable[tuple[str, str]]) -> Mapping[str, ListedVersions]:
    """Merge the entries of all ranks, as JSON, by model. The highest version of a module counts.

    Ranks of a pipeline have other parts of a model, perhaps with placeholders for the rest.
    """
    merged: dict[str, dict[str, Json]] = {}
    for model, text in dict.fromkeys(models):
        listed = merged.setdefault(model, {})
        for path, entry in json.loads(text).items():
            if path not in listed or version_of_entry(entry) > version_of_entry(listed[path]):
                listed[path] = entry
    return merged


def versions_of_names(
    versions: Mapping[str, ListedVersions] | None, names: Iterable[str]
) -> Mapping[str, ListedVersions] | None:
    """Return the versions of those models that have one of the names."""
    if not versions:
        return versions
    above = {"", *modules_above(names)}
    return {model: listed for model, listed in versions.items() if model in above}


def module_entries(
    versions: Mapping[str, ListedVersions] | None, names: Iterable[str]
) -> dict[tuple[str, str], Json]:
    """Return the entry of each module that names are in, by its model and its path there."""
    above = {"", *modules_above(names)}
    entries: dict[tuple[str, str], Json] = {}
    for model, listed in (versions or {}).items():
        if model in above:
            start = len(model) + 1 if model else 0
            paths = {m[start:] for m in above if not model or m.startswith(f"{model}.")}
            entries |= {(model, path): listed.get(path, 1) for path in {"", *paths}}
    return entries


def join_versions(
    live: Mapping[str, ListedVersions] | None,
    carried: Mapping[str, ListedVersions] | None,
    live_names: Iterable[str],
    carried_names: Collection[str],
) -> Mapping[str, ListedVersions] | None:
    """Add the versions of carried modules to those of a save.

    Raises ValueError if a module has names of both, in two versions: it converts all or none.
    """
    if live is None or not (carried := versions_of_names(carried, carried_names)):
        return live
    ours, theirs = module_entries(live, live_names), module_entries(carried, carried_names)
    mixed = {key for key in ours.keys() & theirs.keys() if ours[key] != theirs[key]}
    if mixed:
        model, path = min(mixed)
        raise ValueError(
            f"carry_over: {model}{'.' * bool(model and path)}{path} has version "
            f"{version_of_entry(ours[model, path])}, and version "
            f"{version_of_entry(theirs[model, path])} in the loaded checkpoint. Load and save all "
            f"of this module, or `exclude` its other names from the save"
        )
    joined = {model: {**carried.get(model, {}), **listed} for model, listed in live.items()}
    for model, path in theirs.keys() - ours.keys():
        if model in joined:
            joined[model][path] = theirs[model, path]
    return {**carried, **joined}


def _plain(value: object) -> Json:
    """Return a number or text, or a short list or dict of them; None for anything else."""
    if isinstance(value, dict) and len(value) <= _MAX_ITEMS:
        return {key: of for key, of in value.items() if _is_name(key) and _is_scalar(of)}
    if isinstance(value, list | tuple) and len(value) <= _MAX_ITEMS:
        return [of for of in value if _is_scalar(of)] if all(map(_is_scalar, value)) else None
    return value if _is_scalar(value) else None


def _is_name(value: object) -> TypeGuard[str]:
    return type(value) is str and len(value) <= _MAX_CHARS and (value.isascii() or is_text(value))


def _is_scalar(value: object) -> TypeGuard[bool | int | float | str]:
    if type(value) is str:
        return _is_name(value)
    if type(value) is int:
        return MIN_INTEGER <= value <= MAX_INTEGER
    return type(value) is bool or (type(value) is float and isfinite(value))
