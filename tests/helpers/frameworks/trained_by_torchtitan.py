"""A program: torchtitan's own components train a small model, with our manager; prints losses.

python trained_by_torchtitan.py ROOT [--die STEP] [--stop STEP] [--fail STEP] [--option NAME=JSON]

The loop is that of its `Trainer`, which cannot be imported without triton, so not on a CPU.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw

from dist_ckpt.integrations.torchtitan import RunCheckpointer


class Rows(torch.utils.data.IterableDataset[torch.Tensor]):
    """Rows without an end, other ones for each rank, which know where they are."""

    def __init__(self, rank: int) -> None:
        self.rank, self.row = rank, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            seed = self.row * 100 + self.rank
            self.row += 1
            yield torch.randn(8, generator=torch.Generator().manual_seed(seed))

    def state_dict(self) -> dict[str, int]:
        return {"row": self.row}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.row = state["row"]


class Trained:
    """What a Trainer has of its own, and its loop over the steps."""

    def __init__(self, root: str, options: dict[str, Any]) -> None:
        torch.manual_seed(0)
        self.step = self.ntokens_seen = 0
        model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 8))
        if dist.get_world_size() > 1:
            fully_shard(model)
        self.model = model
        self.optimizers = default_adamw(lr=1e-2, implementation="foreach").build(
            model_parts=[model]
        )
        schedule = LRSchedulersContainer.Config(warmup_steps=3)
        self.lr_schedulers = schedule.build(optimizers=self.optimizers, training_steps=12)
        rank, size = dist.get_rank(), dist.get_world_size()
        self.dataloader = ParallelAwareDataloader(Rows(rank), rank, size, batch_size=4)
        folder: dict[str, Any] = {"enable": True, "interval": 3, "keep_latest_k": 2, **options}
        self.checkpointer = RunCheckpointer.Config(**folder).build(
            dataloader=self.dataloader,
            model_parts=[model],
            optimizers=self.optimizers,
            lr_schedulers=self.lr_schedulers,
            states={"train_state": self},
            sd_adapter=None,
            base_folder=root,
        )

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step, "ntokens_seen": self.ntokens_seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step, self.ntokens_seen = state["step"], state["ntokens_seen"]

    def train(self, asked: argparse.Namespace) -> list[tuple[int, str]]:
        self.checkpointer.load(step=-1)
        losses, batches = [], iter(self.dataloader)
        while self.step < 12:
            self.step += 1
            batch = next(batches)
            self.ntokens_seen += batch.numel()
            self.optimizers.zero_grad()
            loss = self.model(batch).sub(batch).square().mean()
            loss.backward()
            self.checkpointer.maybe_wait_for_staging()
            self.optimizers.step()
            self.lr_schedulers.step()
            losses.append((self.step, loss.item().hex()))
            if self.step == asked.die:
                os.kill(os.getpid(), signal.SIGKILL)
            if self.step == asked.stop:
                os.kill(os.getpid(), signal.SIGTERM)
            if asked.stop:
                time.sleep(0.5)  # ranks agree on a boundary to come, which a fast run may not have
            if self.step == asked.fail:
                raise RuntimeError("the training has failed")
            self.checkpointer.save(self.step, last_step=self.step == 12)
        return losses


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("root")
    parser.add_argument("--die", type=int)
    parser.add_argument("--stop", type=int)
    parser.add_argument("--fail", type=int)
    parser.add_argument("--options", type=json.loads, default={})
    asked = parser.parse_args()
    dist.init_process_group("gloo")
    trained = Trained(asked.root, asked.options)
    try:
        losses = trained.train(asked)
    except Exception:
        trained.checkpointer.close()
        raise
    trained.checkpointer.close()
    weights = [
        one.full_tensor() if isinstance(one, DTensor) else one
        for one in trained.model.state_dict().values()
    ]
    found = b"".join(bytes(one.detach().numpy().tobytes()) for one in weights)
    rates = [group["lr"] for group in trained.optimizers.optimizers[0].param_groups]
    told = {
        "rank": dist.get_rank(),
        "losses": losses,
        "weights": hashlib.sha256(found).hexdigest(),
        "tokens": trained.ntokens_seen,
        "rates": rates,
    }
    sys.stdout.write(json.dumps(told) + "\n")  # at once: another rank prints as well
    sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
