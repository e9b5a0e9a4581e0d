"""What a checkpoint is of: the kind of its model and its configuration, kept in its metadata.

They are the keys `kind`, a text, and `config`, a mapping of plain data. A load, a run that goes on
and a report are held against them.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Mapping
from math import isfinite

from dist_ckpt.core.format.objects.plain_codec import check_plain, decode_value, encode_value
from dist_ckpt.core.format.strict_json import Json, is_text

CONFIG, KIND = "config", "kind"

# It stands in the index, and in tables.
MAX_KIND_CHARS = 200

_LACKING = "nothing"

# What a key is made of that is told as it is.
_PLAIN_KEY = re.compile(r"[^.'\"]+").fullmatch


def check_description(
    metadata: Mapping[str, object] | None, config: object = None, kind: object = None
) -> None:
    """Raise TypeError or ValueError unless these can be a checkpoint's, and each is given once."""
    metadata = metadata or {}
    for name, given in ((CONFIG, config), (KIND, kind)):
        if given is not None and name in metadata:
            raise ValueError(f"{name}= is given, and metadata[{name!r}] as well: give one of them")
    config, kind = metadata.get(CONFIG, config), metadata.get(KIND, kind)
    if config is not None:
        check_config(config)
    if kind is not None:
        check_kind(kind)


def check_config(config: object) -> None:
    """Raise TypeError or ValueError unless this can be a configuration: a mapping of plain data."""
    if not isinstance(config, Mapping):
        raise TypeError(f"config is a {type(config).__name__}: give a dict")
    check_plain(dict(config), CONFIG)


def check_kind(kind: object) -> None:
    """Raise TypeError or ValueError unless this can be a kind: a short text."""
    if not isinstance(kind, str):
        raise TypeError(f'kind={kind!r}: give a text, such as "baseline"')
    if not 1 <= len(kind) <= MAX_KIND_CHARS or not is_text(kind):
        raise ValueError(f"kind={kind[:250]!r}: give a text of 1 to {MAX_KIND_CHARS} characters")


def described(
    metadata: Mapping[str, object] | None,
    config: Mapping[str, object] | None,
    kind: str | None,
) -> dict[str, object]:
    """Return metadata with the configuration and the kind in it, where they are given."""
    own = {} if config is None else {CONFIG: dict(config)}
    return {**(metadata or {}), **own, **({} if kind is None else {KIND: kind})}


def config_of(metadata: Mapping[str, object]) -> Mapping[str, object] | None:
    """Return the configuration in a checkpoint's metadata; None if there is none."""
    config = metadata.get(CONFIG)
    return config if isinstance(config, Mapping) else None


def kind_of(metadata: Mapping[str, object]) -> str | None:
    """Return the kind in a checkpoint's metadata; None if there is none."""
    kind = metadata.get(KIND)
    return kind if isinstance(kind, str) else None


def problems_of_description(
    metadata: Mapping[str, object], config: Mapping[str, object] | None, kind: str | None
) -> list[str]:
    """Return what is otherwise in a checkpoint than who loads it has: a line a difference.

    What is None here is not compared; what the checkpoint lacks cannot be, which is a problem too.
    """
    problems = []
    there = kind_of(metadata)
    if kind is not None and there is None:
        problems.append(_unknown(KIND))
    elif kind not in (None, there):
        problems.append(f"kind: {there!r} there, {kind!r} here")
    stored = config_of(metadata)
    if config is not None and stored is None:
        problems.append(_unknown(CONFIG))
    elif config is not None:
        found = differences(stored, config)
        problems += [
            f"config.{name}: {old} there, {new} here" for name, (old, new) in found.items()
        ]
    return problems


def _unknown(name: str) -> str:
    return (
        f"{name}: it was saved without {name}=, so there is nothing to compare with: load it "
        f"without {name}= if it is the right one"
    )


def differences(then: object, now: object) -> dict[str, tuple[str, str]]:
    """Return by dotted name what two configurations have otherwise, as text."""
    old, new = dict(leaves_of(_as_stored(then))), dict(leaves_of(_as_stored(now)))
    return {
        name: (old.get(name, _LACKING), new.get(name, _LACKING))
        for name in sorted(old.keys() | new.keys())
        if old.get(name, _LACKING) != new.get(name, _LACKING)
    }


def _as_stored(value: object) -> object:
    """Return plain data as it comes from a file: what needs torch or numpy as its stand-in.

    One of two may have been read without torch.
    """
    plain = dict(value) if isinstance(value, Mapping) else value
    return decode_value(encode_value(plain))


def problems_of_report(
    report: Mapping[str, Json], kind: str | None, config: Json, num_parameters: int | None
) -> list[str]:
    """Return what a report says otherwise than its checkpoint, of which None is not known."""
    problems = []
    if kind is not None and report.get(KIND, kind) != kind:
        problems.append(f"{KIND}: {kind!r} in the checkpoint, {report[KIND]!r} in the report")
    if config is not None and CONFIG in report:
        for name, (old, new) in differences(config, report[CONFIG]).items():
            place = f"{CONFIG}.{name}" if name else CONFIG
            problems.append(f"{place}: {old} in the checkpoint, {new} in the report")
    for name in ("num_parameters", "num_params"):
        if num_parameters is not None and report.get(name, num_parameters) != num_parameters:
            found = f"{num_parameters} in the checkpoint, {report[name]!r} in the report"
            problems.append(f"{name}: {found}")
    return problems


def as_json(value: object) -> Json:
    """Return plain data as JSON has it; what JSON lacks is text: a path, nan, a dtype."""
    if isinstance(value, Mapping):
        return {str(key): as_json(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset | deque):
        items = [as_json(inner) for inner in value]
        return sorted(items, key=str) if isinstance(value, set | frozenset) else items
    if value is None or isinstance(value, bool | int | str):
        return value
    return value if isinstance(value, float) and isfinite(value) else str(value)


def leaves_of(value: object, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield the values in nested mappings by dotted name, as text; a list is one value."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            # So that no two places have one name: {"a.b": 1} is not {"a": {"b": 1}}.
            part = str(key) if _PLAIN_KEY(str(key)) else repr(key)
            yield from leaves_of(inner, f"{name}.{part}" if name else part)
    else:
        yield name, _text(value)


def _text(value: object) -> str:
    """Return the same text for what is equal: mappings and sets have no order."""
    if isinstance(value, Mapping):
        items = sorted(f"{key!r}: {_text(inner)}" for key, inner in value.items())
        return f"{{{', '.join(items)}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, set | frozenset) and value:
        return f"{{{', '.join(sorted(map(_text, value)))}}}"
    return repr(value)
