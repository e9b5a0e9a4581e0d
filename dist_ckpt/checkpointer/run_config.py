"""A run's configuration: saved with each checkpoint, compared when a run goes on."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from dist_ckpt.core.format.index.model_description import differences
from dist_ckpt.errors import IncompatibleError, listed


def check_config_matches(
    then: object, now: object, config_must_match: Sequence[str], path: str
) -> str:
    """Return what differs from the checkpoint's configuration, in one line; "" if nothing does.

    IncompatibleError if something does that matches a pattern of `config_must_match`.
    """
    found = differences(then, now)
    text = {name: f"{name}: {old} there, {new} here" for name, (old, new) in found.items()}
    refused = [name for name in found if any(fnmatchcase(name, one) for one in config_must_match)]
    if refused:
        raise IncompatibleError(
            f"{path} was saved with another configuration, which must be the same: "
            f"{listed([text[name] for name in refused], '; ')}. Use that configuration, or another "
            f"root"
        )
    return listed(list(text.values()), "; ")
