"""What type checkers say of a program that uses the package: its author sees it before all else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from docs_blocks import code_of
from tests.repository.test_docs import BLOCKS, JOB, README
from torch_can import of_the_pinned_torch

pytestmark = [pytest.mark.multi_process, pytest.mark.long, pytest.mark.timeout(540)]

ROOT = Path(__file__).parents[2]

# Without a cache mypy reads all of torch first.
LIMIT_S = 500

PROGRAM = """
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, assert_type

import torch
from torch import nn

import dist_ckpt as dc
from dist_ckpt.settings import Settings

model = nn.Linear(2, 2)
optimizer = torch.optim.AdamW(model.parameters())

anything: dict[str, Any] = {"model": model, "optim": optimizer, "step": 3}
modules: dict[str, nn.Module] = {"model": model}
tensors: dict[int, torch.Tensor] = {0: torch.zeros(2)}

dc.save(anything, "ck", step=3)
dc.save(modules, "ck")
dc.save(tensors, "ck")
dc.save({"model": model, "optim": optimizer}, "ck")
dc.save(MappingProxyType(anything), "ck")
counted = {"model": model, "step": 0}
dc.save(counted, "ck")
dc.load(counted, "ck")

dc.load(anything, "ck")
dc.load(modules, "ck")
dc.load(tensors, "ck")
dc.load({"model": model, "optim": optimizer}, "ck")

with dc.AsyncSaver() as saver:
    saver.save(anything, "ck", step=3)
    saver.save(modules, "ck")
    saver.save(tensors, "ck")
    assert_type(saver.save({"model": model, "optim": optimizer}, "ck"), dc.SaveHandle)
    saver.restore(anything)
    saver.restore(modules)
    saver.restore(tensors)
    assert_type(saver.restore({"model": model, "optim": optimizer}), int | None)

assert_type(dc.save(anything, "ck"), dc.SaveReport)
assert_type(dc.load(anything, "ck"), dc.LoadReport)



def merged(values: Mapping[tuple[str, int], list[str]], key: tuple[str, int]) -> list[str]:
    return [name for key in sorted(values) for name in values[key]]


queue = dc.PerRank(["a"], key=("dp", 0), on_reshard=merged)
local = dc.LocalShard(torch.zeros(2, 2), [4, 2], model.weight.shape)
flat = dc.FlatShard(torch.zeros(2), global_shape=torch.Size([4, 2]), start=2)
assert_type(local.tensor, torch.Tensor)
assert_type(flat.tensor, torch.Tensor)
assert_type(local.offset, tuple[int, ...])
dc.save({"queue": queue, "local": local, "flat": flat, "rng": dc.RNG()}, "ck")
dc.save({"optim": dc.Named(optimizer, dict(model.named_parameters()))}, "ck")
dc.save({"optim": dc.Named(optimizer, ["weight", "bias"])}, "ck")

# Mistakes. If one were taken, its `ignore` would be unused, which is an error.
dc.save([model, optimizer], "ck")  # type: ignore[arg-type]
dc.load(MappingProxyType(anything), "ck")  # type: ignore[arg-type]
dc.save(anything, "ck", overwrit=True)  # type: ignore[call-arg]
dc.LocalShard(torch.zeros(2), [4], 0)  # type: ignore[arg-type]

# Names that 0.2.0 has changed.
dc.save(anything, "ck", frozen=False)  # type: ignore[call-arg]
dc.load(anything, "ck", frozen=False)  # type: ignore[call-arg]
dc.AsyncSaver(settle_s=1)  # type: ignore[call-arg]
dc.Checkpointer("run", same=["model"])  # type: ignore[call-arg]
saver.leave()  # type: ignore[attr-defined]
dc.Stopped  # type: ignore[attr-defined]
Settings(silence_s=1)  # type: ignore[call-arg]
"""


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a program of many uses, and all that README and how-to show."""
    folder = tmp_path_factory.mktemp("programs")
    (folder / "uses.py").write_text(PROGRAM)
    (folder / "readme.py").write_text(JOB + "".join(code_of(README, "python")))
    shown = [block for block in BLOCKS if block.page.startswith(("howto/", "tutorial"))]
    programs = [block.code for block in shown if block.language == "python"]
    assert programs
    for number, code in enumerate(programs):
        (folder / f"shown_{number}.py").write_text(code)
    return folder


def check(*command: str, cwd: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@of_the_pinned_torch
def test_mypy_finds_no_mistake_in_what_users_write(programs: Path) -> None:
    pytest.importorskip("mypy")
    # With the project's own settings and cache: what is known of torch already is not read again.
    check("mypy", "--strict", *map(str, sorted(programs.iterdir())), cwd=ROOT)


def test_pyright_finds_no_mistake_in_what_users_write(programs: Path) -> None:
    pytest.importorskip("pyright")
    settings = {
        "include": ["*.py"],
        "extraPaths": [str(ROOT)],
        "pythonVersion": "3.11",
        # torch documents `torch.distributed.checkpoint.save`, and does not export it.
        "reportPrivateImportUsage": "none",
    }
    config = programs / "pyrightconfig.json"
    config.write_text(json.dumps(settings))
    try:
        check("pyright", "--pythonpath", sys.executable, cwd=programs)
    finally:
        config.unlink()
