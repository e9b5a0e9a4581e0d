"""The kind of a checkpoint's model and its configuration, in its metadata.

Loads, resumed runs and reports are compared with `kind`, a text, and `config`, plain data.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Mapping
from math import isfinite

from dist_ckpt.core.format.objects.plain_codec import check_plain, decode_value, encode_value
from dist_ckpt.core.format.strict_json import Json, is_text

CONFIG, KIND = "config", "kind"

# Tables show the kind.
MAX_KIND_CHARS = 200

_MISSING = "nothing"

# A key of such characters needs no quotes.
_PLAIN_KEY = re.compile(r"[^.'\"]+").fullmatch


def check_description(
    metadata: Mapping[str, object] | None, config: object = None, kind: object = None
) -> None:
    """Raise TypeError or ValueError unless config and kind are valid, and each is given once."""
    metadata = metadata or {}
    for name, value in ((CONFIG, config), (KIND, kind)):
        if value is not None and name in metadata:
            raise ValueError(f"{name}= and metadata[{name!r}] are both given: give one of them")
    config, kind = metadata.get(CONFIG, config), metadata.get(KIND, kind)
    if config is not None:
        if not isinstance(config, Mapping):
            raise TypeError(f"config is a {type(config).__name__}: give a dict")
        check_plain(dict(config), CONFIG)
    if kind is None:
        return
    if not isinstance(kind, str):
        raise TypeError(f'kind={kind!r}: give a text, such as "baseline"')
    if not 1 <= len(kind) <= MAX_KIND_CHARS or not is_text(kind):
        raise ValueError(f"kind={kind[:250]!r}: give a text of 1 to {MAX_KIND_CHARS} characters")


def add_description(
    metadata: Mapping[str, object] | None, config: Mapping[str, object] | None, kind: str | None
) -> dict[str, object]:
    """Return metadata with the configuration and the kind, if they are given."""
    entry = {} if config is None else {CONFIG: dict(config)}
    return {**(metadata or {}), **entry, **({} if kind is None else {KIND: kind})}


def config_of(metadata: Mapping[str, object]) -> Mapping[str, object] | None:
    """Return the configuration in a checkpoint's metadata, or None."""
    config = metadata.get(CONFIG)
    return config if isinstance(config, Mapping) else None


def kind_of(metadata: Mapping[str, object]) -> str | None:
    """Return the kind in a checkpoint's metadata, or None."""
    kind = metadata.get(KIND)
    return kind if isinstance(kind, str) else None


def find_description_problems(
    metadata: Mapping[str, object], config: Mapping[str, object] | None, kind: str | None
) -> list[str]:
    """Return the differences from a checkpoint's metadata. None is not compared."""
    problems = []
    stored_kind = kind_of(metadata)
    if kind is not None and stored_kind is None:
        problems.append(_unknown(KIND))
    elif kind not in (None, stored_kind):
        problems.append(f"kind: {stored_kind!r} there, {kind!r} here")
    stored = config_of(metadata)
    if config is not None and stored is None:
        problems.append(_unknown(CONFIG))
    elif config is not None:
        for name, (old, new) in find_differences(stored, config).items():
            problems.append(f"config.{name}: {old} there, {new} here")
    return problems


def _unknown(name: str) -> str:
    return (
        f"{name}: the checkpoint was saved without {name}=, so it cannot be compared: leave out "
        f"{name}= if this is the right checkpoint"
    )


def find_differences(then: object, now: object) -> dict[str, tuple[str, str]]:
    """Return the differences of two configurations as text, by dotted name.

    A tuple is like a list, and a key like its text: YAML and JSON files have only these.
    """
    return find_stored_differences(as_config(then), as_config(now))


def find_stored_differences(then: object, now: object) -> dict[str, tuple[str, str]]:
    """Return the differences of two values as text, by dotted name: also if only types differ."""
    old, new = dict(iterate_leaves(then)), dict(iterate_leaves(now))
    return {
        name: (old.get(name, _MISSING), new.get(name, _MISSING))
        for name in sorted(old.keys() | new.keys())
        if old.get(name, _MISSING) != new.get(name, _MISSING)
    }


def as_config(value: object) -> object:
    """Return a configuration as it is compared, and decoded without torch and numpy."""
    plain = dict(value) if isinstance(value, Mapping) else value
    return _with_lists(decode_value(encode_value(plain)))


def _with_lists(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(key): _with_lists(inner) for key, inner in value.items()}
    return [*map(_with_lists, value)] if isinstance(value, list | tuple) else value


def find_report_problems(
    report: Mapping[str, Json], kind: str | None, config: Json, num_parameters: int | None
) -> list[str]:
    """Return the differences between a report and its checkpoint. None is not compared."""
    problems = []
    if kind is not None and report.get(KIND, kind) != kind:
        problems.append(f"{KIND}: {kind!r} in the checkpoint, {report[KIND]!r} in the report")
    if config is not None and CONFIG in report:
        for name, (old, new) in find_differences(config, report[CONFIG]).items():
            field = f"{CONFIG}.{name}" if name else CONFIG
            problems.append(f"{field}: {old} in the checkpoint, {new} in the report")
    for name in ("num_parameters", "num_params"):
        if num_parameters is not None and report.get(name, num_parameters) != num_parameters:
            values = f"{num_parameters} in the checkpoint, {report[name]!r} in the report"
            problems.append(f"{name}: {values}")
    return problems


def as_json(value: object) -> Json:
    """Return plain data as JSON; other values, such as a path, nan or a dtype, become text."""
    if isinstance(value, Mapping):
        return {str(key): as_json(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset | deque):
        items = [as_json(inner) for inner in value]
        return sorted(items, key=str) if isinstance(value, set | frozenset) else items
    if value is None or isinstance(value, bool | int | str):
        return value
    return value if isinstance(value, float) and isfinite(value) else str(value)


def iterate_leaves(value: object, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield the values in nested mappings by dotted name, as text; a list is one value."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            # Names must be unique: {"a.b": 1} differs from {"a": {"b": 1}}.
            part = str(key) if _PLAIN_KEY(str(key)) else repr(key)
            dotted = f"{name}.{part}" if name else part
            yield from iterate_leaves(inner, dotted if isinstance(key, str) else f"{name}[{key!r}]")
    else:
        yield name, _text(value)


def _text(value: object) -> str:
    """Return equal text for equal values of one type: mappings and sets have no order."""
    if isinstance(value, Mapping):
        items = sorted(f"{key!r}: {_text(inner)}" for key, inner in value.items())
        return f"{{{', '.join(items)}}}"
    if isinstance(value, list | tuple):
        text = ", ".join(map(_text, value)) + "," * (isinstance(value, tuple) and len(value) == 1)
        return f"[{text}]" if isinstance(value, list) else f"({text})"
    if isinstance(value, set | frozenset) and value:
        text = f"{{{', '.join(sorted(map(_text, value)))}}}"
        return text if isinstance(value, set) else f"frozenset({text})"
    return repr(value)
