"""What several adapters take besides the options of `dc.Checkpointer`, checked alike."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any


def extra_state_of(state: Mapping[str, Any] | None, own: Collection[str]) -> dict[str, Any]:
    """Return what is to be saved besides an adapter's `own` keys; ValueError if it has one."""
    if taken := sorted({*(state or {})} & {*own}):
        raise ValueError(f"the state has {', '.join(taken)}, which is saved anyway: rename it")
    return dict(state or {})


def check_on_reshard(on_reshard: str) -> None:
    """Raise ValueError for what does not say what other ranks do with an epoch that has begun."""
    if on_reshard not in ("error", "drop"):
        raise ValueError(f'`on_reshard` is {on_reshard!r}: give "error" or "drop"')
