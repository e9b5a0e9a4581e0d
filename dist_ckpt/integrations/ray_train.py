"""Ray Train: report the path of the newest checkpoint to Ray, and upload nothing.

told = RayCheckpointReporter(run_folder("train"))
with dc.Checkpointer(told.root, on_commit=told.on_commit) as ck:
    for step in ck.steps(state, until=1000):
        told.report({"loss": train(state)})
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from threading import Lock
from typing import TYPE_CHECKING, Any

import ray.train
from ray.train import CheckpointUploadMode

from dist_ckpt.core.checkpoint.checkpoint import Checkpoint
from dist_ckpt.core.runtime.public_names import refuse_old_names
from dist_ckpt.errors import IncompatibleError

if not TYPE_CHECKING:
    __getattr__ = refuse_old_names(__name__, {"CommitsForRay": "RayCheckpointReporter"})


def run_folder(name: str = "checkpoints") -> str:
    """Return a folder for a run inside of that of Ray's experiment; for use in a worker.

    Ray uses a checkpoint in place only inside that folder. All workers must see it: give RunConfig
    a `storage_path` on shared storage.
    """
    storage = ray.train.get_context().get_storage()
    path = str(storage.experiment_fs_path)
    if "local" not in storage.storage_filesystem.type_name:
        raise IncompatibleError(
            f"the experiment is in {storage.storage_filesystem.type_name}:{path}, and checkpoints "
            f"need a file system that all workers mount: give RunConfig(storage_path=...) of one"
        )
    return os.path.join(path, name)


class RayCheckpointReporter:
    """Reports to Ray Train by reference: each commit once, from rank 0, with a later report.

    Give `on_commit` to `dc.Checkpointer`, and call `report` in place of `ray.train.report`, on
    every worker equally often. `Result.checkpoint.path` is then what `dc.load` and `dc.open` take.
    To report the last commit, call `report` after the checkpointer is closed.

    `keep` of the Checkpointer decides which checkpoints stay. Ray's `num_to_keep` also deletes, and
    is refused.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = os.fspath(root)
        _check_num_to_keep()
        self._newest: str | None = None
        self._lock = Lock()

    def on_commit(self, checkpoint: Checkpoint) -> None:
        """Note a commit; Ray hears of it with the next report, as all workers have to report."""
        with self._lock:
            self._newest = checkpoint.path

    def report(self, metrics: Mapping[str, Any]) -> None:
        """Report metrics, and the newest commit if there is one that Ray has not heard of.

        Collective, as `ray.train.report` is: it waits for the other workers.
        """
        with self._lock:
            path, self._newest = self._newest, None
        ray.train.report(
            dict(metrics),
            # Pruned meanwhile: a newer checkpoint is committed, and the next report has it.
            checkpoint=ray.train.Checkpoint(path) if path and os.path.isdir(path) else None,
            checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD,
        )


def _check_num_to_keep() -> None:
    """Raise ValueError if Ray would delete reported checkpoints."""
    from ray.train.v2._internal.execution.context import (  # noqa: PLC0415  (private: it may move)
        get_train_context,
    )

    config = get_train_context().train_run_context.run_config.checkpoint_config
    if config.num_to_keep is not None:
        raise ValueError(
            f"CheckpointConfig(num_to_keep={config.num_to_keep}) would have Ray delete what the "
            f"run goes on from: leave it out, and give keep=dc.keep.last({config.num_to_keep}) to "
            f"dc.Checkpointer"
        )
