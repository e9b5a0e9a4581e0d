"""Log a reference to each checkpoint of a run to MLflow.

with dc.Checkpointer("runs/a", on_commit=log_to_mlflow(run.info.run_id)) as ck:
    ...
"""

from __future__ import annotations

from dataclasses import asdict

from mlflow import MlflowClient

from dist_ckpt.integrations.references import Reference, TrackerThread


def log_to_mlflow(run_id: str, *, client: MlflowClient | None = None) -> TrackerThread:
    """Return an `on_commit` that logs references to an MLflow run; see `TrackerThread`.

    Each is an artifact `checkpoints/step-00000500.json`. For searches, the newest is also in the
    tags `checkpoint.path`, `checkpoint.step` and `checkpoint.digest`. No weights are uploaded.
    `run_id` is the run of rank 0. `client` is by default one with MLflow's current tracking URI.
    """
    return TrackerThread(_MlflowRun(run_id, MlflowClient() if client is None else client))


class _MlflowRun:
    name = "MLflow"

    def __init__(self, run_id: str, client: MlflowClient) -> None:
        self._run_id, self._client = run_id, client

    def put(self, reference: Reference) -> None:
        record = asdict(reference)
        file = f"checkpoints/step-{reference.step or 0:08}.json"
        self._client.log_dict(self._run_id, record, file)
        for name in ("path", "step", "digest"):
            self._client.set_tag(self._run_id, f"checkpoint.{name}", str(record[name]))
