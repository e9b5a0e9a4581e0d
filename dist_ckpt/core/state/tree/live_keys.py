"""Give saved text keys the class of the keys in the state. Pure.

DCP flattens a nested state: the key 3 becomes part of a name, "counts.3". So all keys come back as
text, and all mappings as dicts. The state of the load shows what they were.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Collection, Iterable
from copy import copy

from dist_ckpt.core.state.tree.containers import PathKey

_MAPPINGS = frozenset({Counter, OrderedDict, defaultdict})


def match_keys(saved: Collection[object], live: Iterable[object]) -> dict[PathKey, PathKey]:
    """Return the key of the state for each saved text key that is the text of another key.

    If all keys of the state are integers, and all saved ones are texts of integers, such as other
    milestones of a `MultiStepLR`, they are integers too.
    """
    live_keys = {*live}
    by_text = {str(key): key for key in live_keys if type(key) is not str}
    if not by_text:
        return {}
    matched: dict[PathKey, PathKey] = {
        key: by_text[key]  # type: ignore[misc]  # a key of the user, of whatever class
        for key in saved
        if isinstance(key, str) and key in by_text and by_text[key] not in saved
        if key not in live_keys
    }
    if all(type(key) is int for key in live_keys) and all(map(is_integer_text, saved)):
        matched |= {str(key): int(str(key)) for key in saved}
    return matched


def is_integer_text(key: object) -> bool:
    """Return True for the text of an integer of 64 bits, as `str` writes it."""
    if not isinstance(key, str) or not key.lstrip("-").isdecimal() or len(key) > len(str(1 << 64)):
        return False
    return str(int(key)) == key and -(1 << 63) <= int(key) < 1 << 64


def with_live_class(value: object, live: object) -> object:
    """Return a dict as the Counter, OrderedDict or defaultdict that the state has there."""
    if type(value) is not dict or type(live) not in _MAPPINGS:
        return value
    new = copy(live)  # with its factory
    assert isinstance(new, dict)
    new.clear()
    new.update(value)
    return new
