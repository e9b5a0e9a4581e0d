"""A program: a tiny model in a loop with accelerate; prints what it came to, as JSON.

python trained_by_accelerate.py ROOT [--kind KIND] [--die BATCH] [--stop BATCH]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import sys
import time
import warnings
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch import nn

import dist_ckpt as dc
from dist_ckpt.integrations.accelerate import AcceleratedRun

warnings.filterwarnings("ignore")

seen: list[int] = []
losses: list[float] = []


class Rows(torch.utils.data.Dataset[Any]):
    """48 rows, each known by its first number."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, number: int) -> torch.Tensor:
        row = torch.randn(8, generator=torch.Generator().manual_seed(number))
        row[0] = number
        return row


class Stream(torch.utils.data.IterableDataset[Any]):
    """The same, of a length that nobody says."""

    def __iter__(self) -> Any:
        rows = Rows()
        return (rows[number] for number in range(48))


class Seen:
    """An object of the program's that is registered for checkpointing."""

    num_batches = 0

    def state_dict(self) -> dict[str, Any]:
        return {"num_batches": self.num_batches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_batches = state["num_batches"]


def accelerator_of(kind: str) -> Accelerator:
    """Return the Accelerator of a kind of run."""
    more: dict[str, Any] = {}
    if kind == "fsdp":
        from accelerate import FullyShardedDataParallelPlugin

        more["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="no_wrap"
        )
    config = DataLoaderConfiguration(
        use_seedable_sampler=kind not in ("unseeded", "generator"),
        dispatch_batches=True if kind == "stream" else None,
    )
    steps = 2 if kind == "accumulate" else 1
    return Accelerator(
        cpu=True, gradient_accumulation_steps=steps, dataloader_config=config, **more
    )


def loader_of(kind: str, batch_size: int) -> Any:
    """Return the loader of a kind of run."""
    if kind == "stream":
        return torch.utils.data.DataLoader(Stream(), batch_size=batch_size)
    workers: dict[str, Any] = {"num_workers": 2} if kind == "workers" else {}
    if kind == "generator":
        workers["generator"] = torch.Generator().manual_seed(7)
    return torch.utils.data.DataLoader(Rows(), batch_size=batch_size, shuffle=True, **workers)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("root")
    parser.add_argument("--kind", default="plain")
    parser.add_argument("--die", type=int)
    parser.add_argument("--stop", type=int)
    parser.add_argument("--every", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--anew", action="store_true")
    asked = parser.parse_args()
    accelerator = accelerator_of(asked.kind)
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(16) if asked.kind == "norm" else nn.LayerNorm(16)
    model: Any = nn.Sequential(nn.Linear(8, 16), norm, nn.Dropout(0.2), nn.Linear(16, 8))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.9)
    if asked.kind != "unseeded":
        torch.manual_seed(1)
    else:
        torch.seed()  # another in each process: the order of the data is in the checkpoint
    loader: Any = loader_of(asked.kind, asked.batch_size)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    counted = Seen()
    accelerator.register_for_checkpointing(counted)
    save = dc.every(steps=asked.every) | dc.at_end | dc.on_signal("TERM")
    num_batches = 0
    run = AcceleratedRun(
        accelerator,
        asked.root,
        save=save,
        keep=dc.keep.last(2),
        on_reshard="drop" if asked.anew else "error",
    )
    try:
        with run:
            for _ in run.epochs(3):
                for batch in run.batches(loader):
                    num_batches += 1
                    counted.num_batches += 1
                    seen.extend(int(one) for one in batch[:, 0].tolist())
                    with accelerator.accumulate(model):
                        loss = (model(batch / 8) - 1).square().mean()
                        accelerator.backward(loss)
                        optimizer.step()
                        scheduler.step()
                        optimizer.zero_grad()
                    losses.append(loss.item())
                    run.metrics({"loss": loss.item()})
                    if num_batches == asked.die:
                        os.kill(os.getpid(), signal.SIGKILL)
                    if num_batches == asked.stop:
                        os.kill(os.getpid(), signal.SIGTERM)
                    if asked.stop and num_batches >= asked.stop:
                        time.sleep(0.2)  # as long as a batch takes: ranks agree in the meantime
                torch.rand(3)  # an evaluation draws
    except (ValueError, dc.CheckpointError) as error:
        print(json.dumps({"error": str(error)}))
        return
    state = accelerator.unwrap_model(model).state_dict().values()
    whole = [one.full_tensor() if hasattr(one, "full_tensor") else one for one in state]
    weights = b"".join(bytes(one.detach().numpy().tobytes()) for one in whole)
    found = {
        "rank": accelerator.process_index,
        "seen": seen,
        "losses": losses,
        "step": run.step,
        "batches": counted.num_batches,
        "rates": scheduler.get_last_lr(),
        "weights": hashlib.sha256(weights).hexdigest(),
        "stopped": None if run.stopped is None else run.stopped.step,
    }
    sys.stdout.write(json.dumps(found) + "\n")  # at once: another rank prints as well
    sys.stdout.flush()
    sys.exit(0 if run.stopped is None else run.stopped.exit_code)


if __name__ == "__main__":
    main()
