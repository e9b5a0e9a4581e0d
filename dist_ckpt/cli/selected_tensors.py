"""The tensors that the globs of a command select."""

from __future__ import annotations

from dist_ckpt.core.checkpoint import checkpoint
from dist_ckpt.core.checkpoint.checkpoint import TensorInfo
from dist_ckpt.core.planning.selection import selection_of
from dist_ckpt.openers import OPENER


def selected_tensors(
    path: str, include: tuple[str, ...], exclude: tuple[str, ...]
) -> tuple[str, dict[str, TensorInfo]]:
    """Return a checkpoint's path and its chosen tensors. ValueError if a glob matches nothing."""
    selection = selection_of(include or None, exclude or None)
    with checkpoint.open(path, opener=OPENER) as ck:
        tensors = ck.tensors
        if problems := selection.unmatched(tensors):
            raise ValueError("; ".join(problems))
        return ck.path, {name: info for name, info in tensors.items() if name in selection}
