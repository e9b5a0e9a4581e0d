"""Save and resume Lightning's `Trainer` through a callback, with the position in the data."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dist_ckpt.core.runtime.public_names import lazy_exports

if TYPE_CHECKING:
    from dist_ckpt.integrations.lightning.callback import LightningCheckpoint

__all__ = ["LightningCheckpoint"]

if not TYPE_CHECKING:
    __getattr__ = lazy_exports(
        __name__, {"LightningCheckpoint": "callback"}, {"FitCheckpoint": "LightningCheckpoint"}
    )
