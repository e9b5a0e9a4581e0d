"""A run's configuration: saved with each checkpoint, compared when a run goes on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

from dist_ckpt.errors import IncompatibleError, listed

# Under this key in a checkpoint's metadata.
CONFIG = "config"

_LACKING = "nothing"


def differences(then: object, now: object) -> dict[str, tuple[str, str]]:
    """Return by dotted name what two configurations have otherwise, as text."""
    old, new = dict(_leaves(then, "")), dict(_leaves(now, ""))
    return {
        name: (old.get(name, _LACKING), new.get(name, _LACKING))
        for name in sorted(old.keys() | new.keys())
        if old.get(name, _LACKING) != new.get(name, _LACKING)
    }


def check_same(then: object, now: object, same: Sequence[str], path: str) -> str:
    """Return what differs from the checkpoint's configuration, in one line; "" if nothing does.

    IncompatibleError if something does that matches a pattern of `same`.
    """
    found = differences(then, now)
    text = {name: f"{name}: {old} there, {new} here" for name, (old, new) in found.items()}
    refused = [name for name in found if any(fnmatchcase(name, one) for one in same)]
    if refused:
        raise IncompatibleError(
            f"{path} was saved with another configuration, which must be the same: "
            f"{listed([text[name] for name in refused], '; ')}. Use that configuration, or another "
            f"root"
        )
    return listed(list(text.values()), "; ")


def _leaves(value: object, name: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _leaves(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        yield name, repr(list(value))
    else:
        yield name, repr(value)
