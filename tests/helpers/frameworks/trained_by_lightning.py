"""A program: a tiny module that Lightning's `Trainer` fits; prints what it came to, as JSON.

python trained_by_lightning.py ROOT [--kind KIND] [--die BATCH] [--stop BATCH] [--ckpt-path PATH]
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import signal
import sys
import time
import warnings
from typing import Any

import torch
from torch import nn

NAME = os.environ.get("LIGHTNING", "lightning.pytorch")
pl: Any = importlib.import_module(NAME)

import dist_ckpt as dc  # noqa: E402 - the callback is one of what is imported by then
from dist_ckpt.integrations.lightning.callback import LightningCheckpoint  # noqa: E402

warnings.filterwarnings("ignore")


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


class Module(pl.LightningModule):  # type: ignore[misc]  # it is imported by name
    """Notes which rows it trains on; has dropout, which draws at each step."""

    def __init__(self, asked: argparse.Namespace) -> None:
        super().__init__()
        norm = nn.BatchNorm1d(16) if asked.kind == "norm" else nn.LayerNorm(16)
        self.body = nn.Sequential(nn.Linear(8, 16), norm, nn.Dropout(0.2), nn.Linear(16, 8))
        self.asked, self.num_batches = asked, 0
        self.seen: list[int] = []
        self.losses: list[float] = []
        self.automatic_optimization = asked.kind != "manual"

    def configure_model(self) -> None:
        if self.asked.kind == "fsdp" and not isinstance(
            self.body, torch.distributed.fsdp.FSDPModule
        ):
            for part in (self.body[0], self.body[3]):
                torch.distributed.fsdp.fully_shard(part, mesh=self.device_mesh["data_parallel"])
            torch.distributed.fsdp.fully_shard(self.body, mesh=self.device_mesh["data_parallel"])

    def loss(self, rows: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = (self.body(rows / 8) - 1).square().mean()
        return loss

    def training_step(self, batch: torch.Tensor, _: int) -> Any:
        self.seen += [int(number) for number in batch[:, 0].tolist()]
        loss = self.loss(batch)
        self.losses.append(loss.item())
        self.log("train_loss", loss.detach())
        if self.automatic_optimization:
            return loss
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()
        return None

    def validation_step(self, batch: torch.Tensor, _: int) -> None:
        self.log("val_loss", self.loss(batch) + torch.rand(()), sync_dist=True)

    def on_train_batch_end(self, *args: Any) -> None:
        self.num_batches += 1
        if self.num_batches == self.asked.die:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.num_batches == self.asked.stop:
            os.kill(os.getpid(), signal.SIGTERM)
        if self.asked.stop and self.num_batches >= self.asked.stop:
            time.sleep(0.2)  # as long as a batch takes: ranks agree in the meantime

    def configure_optimizers(self) -> Any:
        if self.asked.kind == "manual":
            halves = (self.body[0].parameters(), self.body[3].parameters())
            return [torch.optim.AdamW(half, lr=0.01) for half in halves]
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        if self.asked.kind == "plateau":
            scheduler: Any = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
            how = {"interval": "step", "monitor": "val_loss", "frequency": 4}
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, **how}}
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.9)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Data(pl.LightningDataModule):  # type: ignore[misc]  # it is imported by name
    """The rows; has a state of its own."""

    def __init__(self, asked: argparse.Namespace) -> None:
        super().__init__()
        self.asked, self.had = asked, 0

    def train_dataloader(self) -> Any:
        if self.asked.kind == "stream":
            return torch.utils.data.DataLoader(Stream(), batch_size=4)
        if self.asked.kind == "stateful":
            library: Any = importlib.import_module("torchdata.stateful_dataloader")
            return library.StatefulDataLoader(Rows(), batch_size=4, shuffle=True)
        workers: dict[str, Any] = {"num_workers": 2} if self.asked.kind == "workers" else {}
        if self.asked.kind == "generator":
            workers["generator"] = torch.Generator().manual_seed(7)
        size = self.asked.batch_size
        return torch.utils.data.DataLoader(Rows(), batch_size=size, shuffle=True, **workers)

    def val_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(Rows(), batch_size=24)

    def state_dict(self) -> dict[str, Any]:
        self.had += 1
        return {"had": self.had}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.had = state["had"]


def callbacks_of(kind: str) -> list[Any]:
    """Return the callbacks that a kind of fit has beside ours."""
    if kind == "ended":
        return [pl.callbacks.EarlyStopping("val_loss", stopping_threshold=100.0)]
    if kind == "unstopped":
        return []
    stop = pl.callbacks.EarlyStopping("val_loss", patience=100)
    if kind == "average":
        return [stop, pl.callbacks.WeightAveraging()]
    if kind == "swa":
        return [stop, pl.callbacks.StochasticWeightAveraging(0.05, swa_epoch_start=1)]
    return [stop]


def strategy_of(kind: str, ranks: int) -> Any:
    """Return the strategy of a kind of fit."""
    if kind == "fsdp":
        return pl.strategies.ModelParallelStrategy(ranks, 1, process_group_backend="gloo")
    return "ddp" if ranks > 1 else "auto"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("root")
    parser.add_argument("--kind", default="plain")
    parser.add_argument("--die", type=int)
    parser.add_argument("--stop", type=int)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--ckpt-path")
    parser.add_argument("--every", type=int, default=3)
    parser.add_argument("--anew", action="store_true")
    asked = parser.parse_args()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    torch.manual_seed(0)
    module = Module(asked)
    callback = LightningCheckpoint(
        asked.root,
        save=dc.every(steps=asked.every) | dc.at_end | dc.on_signal("TERM"),
        keep=dc.keep.last(2) | dc.keep.best(1, min="val_loss"),
        on_reshard="drop" if asked.anew else "error",
    )
    limits: dict[str, Any] = {"max_epochs": 3}
    if asked.kind == "steps":
        limits = {"max_steps": 30, "max_epochs": -1}
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=strategy_of(asked.kind, ranks),
        callbacks=[callback, *callbacks_of(asked.kind)],
        accumulate_grad_batches=2 if asked.kind == "accumulate" else 1,
        val_check_interval=4 if asked.kind != "stream" else 3,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **limits,
    )
    data = Data(asked)
    try:
        trainer.fit(module, datamodule=data, ckpt_path=asked.ckpt_path)
    except (ValueError, dc.CheckpointError) as error:
        print(json.dumps({"error": str(error)}))
        return
    state = module.state_dict().values()
    whole = [one.full_tensor() if hasattr(one, "full_tensor") else one for one in state]
    weights = b"".join(bytes(one.detach().numpy().tobytes()) for one in whole)
    found = {
        "rank": trainer.global_rank,
        "seen": module.seen,
        "step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "weights": hashlib.sha256(weights).hexdigest(),
        "losses": module.losses,
        "rates": [group["lr"] for one in trainer.optimizers for group in one.param_groups],
        "had": data.had > 0,
        "stopped": None if callback.stopped is None else callback.stopped.step,
    }
    sys.stdout.write(json.dumps(found) + "\n")  # at once: another rank prints as well
    sys.stdout.flush()
    sys.exit(0 if callback.stopped is None else callback.stopped.exit_code)


if __name__ == "__main__":
    main()
