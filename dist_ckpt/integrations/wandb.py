"""Log a reference to each checkpoint of a run to Weights & Biases.

with dc.Checkpointer("runs/a", on_commit=log_to_wandb(run)) as ck:
    ...
"""

from __future__ import annotations

from dataclasses import asdict

import wandb

from dist_ckpt.integrations.references import Reference, TrackerThread


def log_to_wandb(run: wandb.Run, *, name: str | None = None) -> TrackerThread:
    """Return an `on_commit` that logs references as versions of one artifact; see `TrackerThread`.

    A version refers only to the checkpoint's index, one small file, which W&B reads for a checksum.
    No weights are read or uploaded. Its metadata are the path, step, size and digest, and the step
    is also its alias. `run` is the run of rank 0. `name` is by default "checkpoint-" and the id of
    `run`. Close the result before the run is finished.
    """
    return TrackerThread(_Artifacts(run, name or f"checkpoint-{run.id}"))


class _Artifacts:
    name = "W&B"

    def __init__(self, run: wandb.Run, name: str) -> None:
        self._run, self._artifact_name = run, name

    def put(self, reference: Reference) -> None:
        metadata = asdict(reference)
        artifact = wandb.Artifact(self._artifact_name, type="checkpoint", metadata=metadata)
        artifact.add_reference(reference.index, name="index.json")
        self._run.log_artifact(artifact, aliases=["latest", f"step-{reference.step}"])
