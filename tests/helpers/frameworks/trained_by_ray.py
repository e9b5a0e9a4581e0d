"""A program: Ray Train trains a small model on two workers; prints what it came to, as JSON.

python trained_by_ray.py FOLDER [--die STEP] [--num-to-keep N]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import ray.train
import torch
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dist_ckpt as dc
from dist_ckpt.integrations.ray_train import RayCheckpointReporter, run_folder


def train(config: dict[str, Any]) -> None:
    """Train one worker's part; die once, if it is told to."""
    torch.manual_seed(0)
    rank = ray.train.get_context().get_world_rank()
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 8))
    )
    optimizer = torch.optim.AdamW(model.parameters())
    state: dict[str, Any] = {"model": model, "optim": optimizer, "rng": dc.RNG()}
    told = RayCheckpointReporter(run_folder())
    save = dc.every(steps=3) | dc.at_end
    begun = ray.train.get_checkpoint()
    started_at = None
    with dc.Checkpointer(
        told.root, save=save, keep=dc.keep.last(2), on_commit=told.on_commit
    ) as ck:
        for step in ck.steps(state, until=12):
            started_at = step if started_at is None else started_at
            seed = step * 10 + rank
            rows = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
            optimizer.zero_grad()
            loss = model(rows).sub(rows).square().mean()
            loss.backward()
            optimizer.step()
            flag = Path(config["folder"]) / "died"
            if step == config["die"] and rank == 1 and not flag.exists():
                flag.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            told.report({"loss": loss.item(), "step": step})
    weights = b"".join(bytes(one.numpy().tobytes()) for one in model.state_dict().values())
    told.report(
        {
            "weights": hashlib.sha256(weights).hexdigest(),
            "loss": loss.item().hex(),
            "started_at": started_at,
            "begun_from": begun and begun.path,
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--die", type=int)
    parser.add_argument("--num-to-keep", type=int)
    asked = parser.parse_args()
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    trainer = TorchTrainer(
        train,
        train_loop_config={"die": asked.die, "folder": asked.folder},
        scaling_config=ScalingConfig(num_workers=2, use_gpu=False),
        torch_config=TorchConfig(backend="gloo"),
        run_config=RunConfig(
            name="run",
            storage_path=asked.folder,
            failure_config=FailureConfig(max_failures=1 if asked.die else 0),
            checkpoint_config=CheckpointConfig(num_to_keep=asked.num_to_keep),
        ),
    )
    result = trainer.fit()
    assert result.checkpoint is not None
    with dc.open(result.checkpoint.path) as found:
        step = found.step
    print(json.dumps({**(result.metrics or {}), "path": result.checkpoint.path, "step": step}))


if __name__ == "__main__":
    main()
