"""Checkpoints for multi-GPU PyTorch training: atomic, checked, resharded to any world size.

    import dist_ckpt as dc

    dc.save({"model": model, "optim": optimizer}, "runs/a/step-00001000", step=1000)
    dc.load({"model": model, "optim": optimizer}, "runs/a/step-00001000")

Importing it does not import torch; `save` and `load` do.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from dist_ckpt.errors import (
    CheckpointError,
    ConflictError,
    CorruptError,
    ExistsError,
    IncompatibleError,
    NotFoundError,
    RankError,
    StorageError,
)

if TYPE_CHECKING:
    from dist_ckpt.averaging.average import average
    from dist_ckpt.background.async_saver import AsyncSaver
    from dist_ckpt.background.handle import SaveHandle
    from dist_ckpt.checkpointer.checkpointer import Checkpointer
    from dist_ckpt.checkpointer.open_run import Stopped
    from dist_ckpt.checkpointer.when import at, at_end, every, on_signal
    from dist_ckpt.data.data_position import DataPosition
    from dist_ckpt.data.elastic_sampler import ElasticSampler
    from dist_ckpt.loading.build import build
    from dist_ckpt.loading.from_bytes import from_bytes, load_bytes
    from dist_ckpt.loading.load import load
    from dist_ckpt.loading.sources import Source
    from dist_ckpt.offline.backup import backup
    from dist_ckpt.offline.checkpoint import Checkpoint, open  # noqa: A004 - like `gzip.open`
    from dist_ckpt.offline.compare import Comparison, RunSummary, compare
    from dist_ckpt.offline.copying import copy
    from dist_ckpt.offline.diff import Difference, ValueDifference, diff
    from dist_ckpt.offline.estimate import Estimate, estimate
    from dist_ckpt.offline.layout import CheckpointLayout, FileLayout, HeldShard, layout
    from dist_ckpt.offline.reshard import reshard
    from dist_ckpt.offline.run import Run
    from dist_ckpt.offline.stats import TensorStats, stats
    from dist_ckpt.offline.strip import strip
    from dist_ckpt.offline.verify import VerifyReport, verify
    from dist_ckpt.planning.sharding_config import ShardingConfig
    from dist_ckpt.reports import LoadedSource, LoadReport, SaveReport
    from dist_ckpt.runs import keep
    from dist_ckpt.runs.listing import RunCheckpoint, checkpoints
    from dist_ckpt.runs.removing import delete
    from dist_ckpt.saving.save import save
    from dist_ckpt.saving.to_bytes import to_bytes
    from dist_ckpt.state.wrappers import RNG, FlatShard, LocalShard, Named, PerRank

__version__ = "0.1.0"

# Public name -> module, but for the errors, which need nothing. Each is imported when it is first
# used, so that reading and listing checkpoints needs no torch.
_MODULES = {
    "save": "saving.save",
    "AsyncSaver": "background.async_saver",
    "SaveHandle": "background.handle",
    "Checkpointer": "checkpointer.checkpointer",
    "Stopped": "checkpointer.open_run",
    "every": "checkpointer.when",
    "at": "checkpointer.when",
    "at_end": "checkpointer.when",
    "on_signal": "checkpointer.when",
    "load": "loading.load",
    "to_bytes": "saving.to_bytes",
    "from_bytes": "loading.from_bytes",
    "load_bytes": "loading.from_bytes",
    "Source": "loading.sources",
    "build": "loading.build",
    "open": "offline.checkpoint",
    "Checkpoint": "offline.checkpoint",
    "verify": "offline.verify",
    "VerifyReport": "offline.verify",
    "reshard": "offline.reshard",
    "compare": "offline.compare",
    "Comparison": "offline.compare",
    "RunSummary": "offline.compare",
    "diff": "offline.diff",
    "Difference": "offline.diff",
    "ValueDifference": "offline.diff",
    "stats": "offline.stats",
    "TensorStats": "offline.stats",
    "layout": "offline.layout",
    "CheckpointLayout": "offline.layout",
    "FileLayout": "offline.layout",
    "HeldShard": "offline.layout",
    "estimate": "offline.estimate",
    "Estimate": "offline.estimate",
    "copy": "offline.copying",
    "backup": "offline.backup",
    "strip": "offline.strip",
    "average": "averaging.average",
    "Run": "offline.run",
    "delete": "runs.removing",
    "checkpoints": "runs.listing",
    "RunCheckpoint": "runs.listing",
    "SaveReport": "reports",
    "LoadReport": "reports",
    "LoadedSource": "reports",
    "ShardingConfig": "planning.sharding_config",
    "LocalShard": "state.wrappers",
    "FlatShard": "state.wrappers",
    "PerRank": "state.wrappers",
    "RNG": "state.wrappers",
    "Named": "state.wrappers",
    "DataPosition": "data.data_position",
    "ElasticSampler": "data.elastic_sampler",
}

# Public modules, imported when first used as well.
_PUBLIC_MODULES = {"keep": "runs.keep"}

__all__ = [
    "RNG",
    "AsyncSaver",
    "Checkpoint",
    "CheckpointError",
    "CheckpointLayout",
    "Checkpointer",
    "Comparison",
    "ConflictError",
    "CorruptError",
    "DataPosition",
    "Difference",
    "ElasticSampler",
    "Estimate",
    "ExistsError",
    "FileLayout",
    "FlatShard",
    "HeldShard",
    "IncompatibleError",
    "LoadReport",
    "LoadedSource",
    "LocalShard",
    "Named",
    "NotFoundError",
    "PerRank",
    "RankError",
    "Run",
    "RunCheckpoint",
    "RunSummary",
    "SaveHandle",
    "SaveReport",
    "ShardingConfig",
    "Source",
    "Stopped",
    "StorageError",
    "TensorStats",
    "ValueDifference",
    "VerifyReport",
    "at",
    "at_end",
    "average",
    "backup",
    "build",
    "checkpoints",
    "compare",
    "copy",
    "delete",
    "diff",
    "estimate",
    "every",
    "from_bytes",
    "keep",
    "layout",
    "load",
    "load_bytes",
    "on_signal",
    "open",
    "reshard",
    "save",
    "stats",
    "strip",
    "to_bytes",
    "verify",
]


def __getattr__(name: str) -> object:
    if name in _PUBLIC_MODULES:
        return importlib.import_module(f"{__name__}.{_PUBLIC_MODULES[name]}")
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(
            f'dist_ckpt.{name} needs torch: pip install "dist-ckpt[torch]", or ".[torch]" in a '
            f"clone. What opens, verifies, reshards and deletes checkpoints does not"
        ) from None


def __dir__() -> list[str]:
    return __all__
