"""Check the options that several adapters have in addition to those of `dc.Checkpointer`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any


def extra_state_of(state: Mapping[str, Any] | None, own: Collection[str]) -> dict[str, Any]:
    """Return the extra state to save. ValueError if it has one of the adapter's `own` keys."""
    if taken := sorted({*(state or {})} & {*own}):
        raise ValueError(f"the state has {', '.join(taken)}, which is saved anyway: rename it")
    return dict(state or {})


def check_on_reshard(on_reshard: str) -> None:
    """Raise ValueError for an unknown value of `on_reshard`."""
    if on_reshard not in ("error", "drop"):
        raise ValueError(f'`on_reshard` is {on_reshard!r}: give "error" or "drop"')
