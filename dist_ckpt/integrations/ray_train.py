"""Report the path of the newest checkpoint to Ray Train, and upload nothing.

reporter = RayCheckpointReporter(run_folder("train"))
with dc.Checkpointer(reporter.root, on_commit=reporter.on_commit) as ck:
    for step in ck.steps(state, until=1000):
        reporter.report({"loss": train(state)})
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
    """Return a folder for a run, inside the folder of Ray's experiment. Call it in a worker.

    Ray uses a checkpoint in place only inside that folder. All workers must see it: give RunConfig
    a `storage_path` on shared storage.
    """
    storage = ray.train.get_context().get_storage()
    path = str(storage.experiment_fs_path)
    if "local" not in storage.storage_filesystem.type_name:
        raise IncompatibleError(
            f"the experiment is in {storage.storage_filesystem.type_name}:{path}, but checkpoints "
            f"need a file system that all workers mount: give its path, RunConfig(storage_path=...)"
        )
    return os.path.join(path, name)


class RayCheckpointReporter:
    """Reports to Ray Train by reference: each commit once, from rank 0, with a later report.

    Give `on_commit` to `dc.Checkpointer`, and call `report` in place of `ray.train.report`, on
    every worker equally often. `Result.checkpoint.path` is then a path for `dc.load` and `dc.open`.
    To report the last commit, call `report` after the checkpointer is closed.

    `keep` of the Checkpointer decides which checkpoints stay. Ray's `num_to_keep`, which also
    deletes, is refused.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = os.fspath(root)
        _check_num_to_keep()
        self._newest: str | None = None
        self._lock = Lock()

    def on_commit(self, checkpoint: Checkpoint) -> None:
        """Note a commit for the next report, as all workers must report together."""
        with self._lock:
            self._newest = checkpoint.path

    def report(self, metrics: Mapping[str, Any]) -> None:
        """Report metrics, and the newest commit unless it is already reported.

        Collective, as `ray.train.report`: it waits for the other workers.
        """
        with self._lock:
            path, self._newest = self._newest, None
        ray.train.report(
            dict(metrics),
            # If it was pruned meanwhile, a newer one is committed, and is in the next report.
            checkpoint=ray.train.Checkpoint(path) if path and os.path.isdir(path) else None,
            checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD,
        )


def _check_num_to_keep() -> None:
    """Raise ValueError if Ray would delete reported checkpoints."""
    from ray.train.v2._internal.execution.context import get_train_context  # noqa: PLC0415  (private: it may move)

    config = get_train_context().train_run_context.run_config.checkpoint_config
    if config.num_to_keep is not None:
        raise ValueError(
            f"with CheckpointConfig(num_to_keep={config.num_to_keep}) Ray would delete checkpoints "
            f"that a resume needs: leave it out, and give keep=dc.keep.last({config.num_to_keep}) "
            f"to dc.Checkpointer"
        )
