"""Weights & Biases: each checkpoint of a run, by reference.

with dc.Checkpointer("runs/a", on_commit=log_to_wandb(run)) as ck:
    ...
"""

from __future__ import annotations

import wandb

from dist_ckpt.integrations.references import Reference, TrackerThread, as_record


def log_to_wandb(run: wandb.Run, *, name: str | None = None) -> TrackerThread:
    """Return an `on_commit` that logs references as versions of one artifact; see `TrackerThread`.

    A version refers to the checkpoint's index alone, which W&B reads for its own checksum: one file
    however many ranks there are, and no weights are read or uploaded. The path, the step, the size
    and the digest are its metadata, the step is its alias as well. `name` is None for
    "checkpoint-" and the id of `run`, which is rank 0's. Close it before the run is finished.
    """
    return TrackerThread(_Artifacts(run, name or f"checkpoint-{run.id}"))


class _Artifacts:
    name = "W&B"

    def __init__(self, run: wandb.Run, name: str) -> None:
        self._run, self._artifact_name = run, name

    def put(self, reference: Reference) -> None:
        artifact = wandb.Artifact(
            self._artifact_name, type="checkpoint", metadata=as_record(reference)
        )
        artifact.add_reference(reference.index, name="index.json")
        self._run.log_artifact(artifact, aliases=["latest", f"step-{reference.step}"])
