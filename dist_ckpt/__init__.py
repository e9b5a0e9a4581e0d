"""Checkpoints for multi-GPU PyTorch training: atomic, checked, resharded to any world size.

    import dist_ckpt as dc

    dc.save({"model": model, "optim": optimizer}, "runs/a/step-00001000", step=1000)
    dc.load({"model": model, "optim": optimizer}, "runs/a/step-00001000")

Importing it does not import torch; `save` and `load` do.
"""

from __future__ import annotations

import functools
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
    from dist_ckpt.async_save.async_saver import AsyncSaver
    from dist_ckpt.async_save.trainer.writer_handle import SaveHandle
    from dist_ckpt.checkpointer.checkpointer import Checkpointer
    from dist_ckpt.checkpointer.run_session import TrainingStopped
    from dist_ckpt.checkpointer.save_policy import at, at_end, every, on_signal
    from dist_ckpt.core.checkpoint.checkpoint import Checkpoint, open  # noqa: A004 - like `gzip.open`
    from dist_ckpt.core.checkpoint.verify import VerifyReport, verify
    from dist_ckpt.core.loading.build import build
    from dist_ckpt.core.loading.load import load
    from dist_ckpt.core.loading.load_options import Source
    from dist_ckpt.core.planning.sharding_config import ShardingConfig
    from dist_ckpt.core.saving.save import save
    from dist_ckpt.core.state.wrappers import RNG, FlatShard, LocalShard, Named, PerRank
    from dist_ckpt.core.state_as_bytes import from_bytes, load_bytes, to_bytes
    from dist_ckpt.data import DataPosition, ElasticSampler
    from dist_ckpt.reports import LoadedSource, LoadReport, SaveReport
    from dist_ckpt.runs import retention_policy as keep
    from dist_ckpt.runs.listing import RunCheckpoint, checkpoints
    from dist_ckpt.runs.prune import delete
    from dist_ckpt.runs.run import Run
    from dist_ckpt.tools.average.average import average
    from dist_ckpt.tools.inspect.describe import (
        CheckpointLayout,
        FileContents,
        ShardPlacement,
        TensorStats,
        layout,
        stats,
    )
    from dist_ckpt.tools.inspect.diff import (
        Comparison,
        Difference,
        ObjectDifference,
        RunSummary,
        compare,
        diff,
    )
    from dist_ckpt.tools.inspect.estimate import Estimate, estimate
    from dist_ckpt.tools.rewrite.copying import backup, copy
    from dist_ckpt.tools.rewrite.reshard import reshard
    from dist_ckpt.tools.rewrite.strip import strip

__version__ = "0.2.0.dev0"

# Public name -> module. Each is imported at its first use, so that reading and listing checkpoints
# needs no torch. The errors are imported at once: they need nothing.
_MODULES = {
    "save": "core.saving.save",
    "AsyncSaver": "async_save.async_saver",
    "SaveHandle": "async_save.trainer.writer_handle",
    "Checkpointer": "checkpointer.checkpointer",
    "TrainingStopped": "checkpointer.run_session",
    "every": "checkpointer.save_policy",
    "at": "checkpointer.save_policy",
    "at_end": "checkpointer.save_policy",
    "on_signal": "checkpointer.save_policy",
    "load": "core.loading.load",
    "to_bytes": "core.state_as_bytes",
    "from_bytes": "core.state_as_bytes",
    "load_bytes": "core.state_as_bytes",
    "Source": "core.loading.load_options",
    "build": "core.loading.build",
    "open": "core.checkpoint.checkpoint",
    "Checkpoint": "core.checkpoint.checkpoint",
    "verify": "core.checkpoint.verify",
    "VerifyReport": "core.checkpoint.verify",
    "reshard": "tools.rewrite.reshard",
    "compare": "tools.inspect.diff",
    "Comparison": "tools.inspect.diff",
    "RunSummary": "tools.inspect.diff",
    "diff": "tools.inspect.diff",
    "Difference": "tools.inspect.diff",
    "ObjectDifference": "tools.inspect.diff",
    "stats": "tools.inspect.describe",
    "TensorStats": "tools.inspect.describe",
    "layout": "tools.inspect.describe",
    "CheckpointLayout": "tools.inspect.describe",
    "FileContents": "tools.inspect.describe",
    "ShardPlacement": "tools.inspect.describe",
    "estimate": "tools.inspect.estimate",
    "Estimate": "tools.inspect.estimate",
    "copy": "tools.rewrite.copying",
    "backup": "tools.rewrite.copying",
    "strip": "tools.rewrite.strip",
    "average": "tools.average.average",
    "Run": "runs.run",
    "delete": "runs.prune",
    "checkpoints": "runs.listing",
    "RunCheckpoint": "runs.listing",
    "SaveReport": "reports",
    "LoadReport": "reports",
    "LoadedSource": "reports",
    "ShardingConfig": "core.planning.sharding_config",
    "LocalShard": "core.state.wrappers",
    "FlatShard": "core.state.wrappers",
    "PerRank": "core.state.wrappers",
    "RNG": "core.state.wrappers",
    "Named": "core.state.wrappers",
    "DataPosition": "data",
    "ElasticSampler": "data",
}

# Names that 0.2.0 has changed.
_NEW_NAMES = {
    "FileLayout": "FileContents",
    "HeldShard": "ShardPlacement",
    "Stopped": "TrainingStopped",
    "ValueDifference": "ObjectDifference",
}

# Functions of the core that open a user's path: they get `openers.OPENER`.
_WITH_OPENER = frozenset({"open", "verify", "load", "build"})

# Public modules, also imported at their first use.
_PUBLIC_MODULES = {"keep": "runs.retention_policy"}

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
    "FileContents",
    "FlatShard",
    "IncompatibleError",
    "LoadReport",
    "LoadedSource",
    "LocalShard",
    "Named",
    "NotFoundError",
    "ObjectDifference",
    "PerRank",
    "RankError",
    "Run",
    "RunCheckpoint",
    "RunSummary",
    "SaveHandle",
    "SaveReport",
    "ShardPlacement",
    "ShardingConfig",
    "Source",
    "StorageError",
    "TensorStats",
    "TrainingStopped",
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


@functools.cache
def _with_opener(name: str) -> object:
    function = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    bound = importlib.import_module(f"{__name__}.openers").with_opener(function)
    bound.__module__ = __name__  # pickle finds it here
    return bound


# Hidden from type checkers, which know all names and report others.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name in _PUBLIC_MODULES:
            return importlib.import_module(f"{__name__}.{_PUBLIC_MODULES[name]}")
        module = _MODULES.get(name)
        if module is None:
            public_names = importlib.import_module(f"{__name__}.core.runtime.public_names")
            return public_names.refuse_old_names(__name__, _NEW_NAMES)(name)
        try:
            if name in _WITH_OPENER:
                return _with_opener(name)
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            raise ImportError(
                f'dist_ckpt.{name} needs torch: pip install "dist-ckpt[torch]", or ".[torch]" in a '
                f"clone. Opening, verifying, resharding and deleting checkpoints works without it"
            ) from None


def __dir__() -> list[str]:
    return __all__
