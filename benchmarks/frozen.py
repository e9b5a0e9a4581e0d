"""What saves of a model with frozen weights write, without and with `link_unchanged=`.

    .venv/bin/python -m benchmarks.frozen --dir /tmp

Layers of 1024 x 1024 that do not train, each with LoRA weights of rank 8 that do, and AdamW.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

import dist_ckpt as dc

WIDTH = 1024
RANK = 8
LAYERS = 16


def main(arguments: Sequence[str] | None = None) -> None:
    """Print what each save writes and links."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--dir", default=tempfile.gettempdir())
    parser.add_argument("--saves", type=int, default=5)
    args = parser.parse_args(arguments)
    for link_unchanged in ((), "model.*.base"):
        with tempfile.TemporaryDirectory(dir=args.dir, prefix="frozen-") as folder:
            print(f"link_unchanged={link_unchanged!r}")
            for report in _train(Path(folder), args.saves, link_unchanged):
                written, linked = report.storage_writes.nbytes, report.nbytes_linked
                print(
                    f"  step {report.step}: {written / 1e6:6.2f} MB written, "
                    f"{linked / 1e6:6.2f} MB linked, {report.total_s:.3f} s"
                )


def _train(folder: Path, saves: int, link_unchanged: str | Sequence[str]) -> list[dc.SaveReport]:
    layers = [
        nn.ModuleDict(
            {
                "base": nn.Linear(WIDTH, WIDTH).requires_grad_(requires_grad=False),
                "lora": nn.Sequential(
                    nn.Linear(WIDTH, RANK, bias=False), nn.Linear(RANK, WIDTH, bias=False)
                ),
            }
        )
        for _ in range(LAYERS)
    ]
    model = nn.ModuleDict({str(number): layer for number, layer in enumerate(layers)})
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    reports = []
    for step in range(1, saves + 1):
        values = torch.randn(4, WIDTH)
        for layer in layers:
            values = values + layer["base"](values) + layer["lora"](values)
        values.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        state = {"model": model, "optim": optimizer}
        reports.append(
            dc.save(state, folder / f"step-{step}", step=step, link_unchanged=link_unchanged)
        )
    return reports


if __name__ == "__main__":
    main()
