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
    from dist_ckpt.checkpointer.checkpointer import Checkpointer, close_all
    from dist_ckpt.checkpointer.run_session import TrainingStopped
    from dist_ckpt.checkpointer.save_policy import at, at_end, every, on_signal
    from dist_ckpt.core.checkpoint.checkpoint import Checkpoint, open  # noqa: A004 - like `gzip.open`
    from dist_ckpt.core.checkpoint.verify_checkpoint import VerifyReport, verify
    from dist_ckpt.core.loading.build import build
    from dist_ckpt.core.loading.from_bytes import from_bytes, load_bytes
    from dist_ckpt.core.loading.load import load
    from dist_ckpt.core.loading.load_options import Source
    from dist_ckpt.core.planning.sharding_config import ShardingConfig
    from dist_ckpt.core.planning.tensor_operations import (
        Concatenate,
        Split,
        Stack,
        Transpose,
        Unstack,
    )
    from dist_ckpt.core.saving.save import save
    from dist_ckpt.core.saving.to_bytes import to_bytes
    from dist_ckpt.core.state.wrappers import RNG, FlatShard, LocalShard, Named, PerRank
    from dist_ckpt.data import DataPosition, ElasticSampler
    from dist_ckpt.reports import LoadedSource, LoadReport, SaveReport
    from dist_ckpt.runs import retention_policy as keep
    from dist_ckpt.runs.listing import RunCheckpoint, checkpoints
    from dist_ckpt.runs.prune import delete
    from dist_ckpt.runs.run import Run
    from dist_ckpt.tools.average.average import average
    from dist_ckpt.tools.inspect.compare import Comparison, RunSummary, compare
    from dist_ckpt.tools.inspect.describe import (
        CheckpointLayout,
        FileContents,
        ShardPlacement,
        TensorStats,
        layout,
        stats,
    )
    from dist_ckpt.tools.inspect.diff import Difference, ObjectDifference, diff
    from dist_ckpt.tools.inspect.estimate import Estimate, estimate
    from dist_ckpt.tools.rewrite.copying import backup, copy
    from dist_ckpt.tools.rewrite.reshard import reshard
    from dist_ckpt.tools.rewrite.strip import strip

__version__ = "0.2.0.dev0"

# The public names of each module. A name is imported at its first use, so that checkpoints can be
# listed and read without torch. Only the errors are imported immediately.
_NAMES = {
    "core.saving.save": "save",
    "async_save.async_saver": "AsyncSaver",
    "async_save.trainer.writer_handle": "SaveHandle",
    "checkpointer.checkpointer": "Checkpointer close_all",
    "checkpointer.run_session": "TrainingStopped",
    "checkpointer.save_policy": "every at at_end on_signal",
    "core.loading.load": "load",
    "core.saving.to_bytes": "to_bytes",
    "core.loading.from_bytes": "from_bytes load_bytes",
    "core.loading.load_options": "Source",
    "core.loading.build": "build",
    "core.checkpoint.checkpoint": "open Checkpoint",
    "core.checkpoint.verify_checkpoint": "verify VerifyReport",
    "tools.rewrite.reshard": "reshard",
    "tools.inspect.compare": "compare Comparison RunSummary",
    "tools.inspect.diff": "diff Difference ObjectDifference",
    "tools.inspect.describe": (
        "stats TensorStats layout CheckpointLayout FileContents ShardPlacement"
    ),
    "tools.inspect.estimate": "estimate Estimate",
    "tools.rewrite.copying": "copy backup",
    "tools.rewrite.strip": "strip",
    "tools.average.average": "average",
    "runs.run": "Run",
    "runs.prune": "delete",
    "runs.listing": "checkpoints RunCheckpoint",
    "reports": "SaveReport LoadReport LoadedSource",
    "core.planning.sharding_config": "ShardingConfig",
    "core.planning.tensor_operations": "Stack Unstack Transpose Concatenate Split",
    "core.state.wrappers": "LocalShard FlatShard PerRank RNG Named",
    "data": "DataPosition ElasticSampler",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}

# Old names, which 0.2.0 has changed. Their use raises an error with the new name.
_NEW_NAMES = {
    "FileLayout": "FileContents",
    "HeldShard": "ShardPlacement",
    "Stopped": "TrainingStopped",
    "ValueDifference": "ObjectDifference",
    "html_report": "tools.report",
}

# Functions of the core that open a user's path. They get `default_opener.OPENER` as their `opener`.
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
    "Concatenate",
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
    "Split",
    "Stack",
    "StorageError",
    "TensorStats",
    "TrainingStopped",
    "Transpose",
    "Unstack",
    "VerifyReport",
    "at",
    "at_end",
    "average",
    "backup",
    "build",
    "checkpoints",
    "close_all",
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
    bound = importlib.import_module(f"{__name__}.default_opener").with_opener(function)
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
