"""accelerate: a run of prepared objects, saved and resumed; also `save_state`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dist_ckpt.core.runtime.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from dist_ckpt.integrations.accelerate.checkpointing import AcceleratedRun, attach

__all__ = [
    "AcceleratedRun",
    "attach",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "AcceleratedRun": "checkpointing",
        "attach": "checkpointing",
    },
)
