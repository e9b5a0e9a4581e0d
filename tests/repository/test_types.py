"""What mypy says of a program that uses the package: the first thing that its author sees of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.multi_process, pytest.mark.timeout(540)]

ROOT = Path(__file__).parents[2]

# Without a cache mypy reads all of torch first.
MYPY_LIMIT_S = 500

PROGRAM = """
from types import MappingProxyType
from typing import Any, assert_type

import torch
from torch import nn

import dist_ckpt as dc

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

# Mistakes. If one were taken, its `ignore` would be unused, which is an error.
dc.save([model, optimizer], "ck")  # type: ignore[arg-type]
dc.load(MappingProxyType(anything), "ck")  # type: ignore[arg-type]
dc.save(anything, "ck", overwrit=True)  # type: ignore[call-arg]
"""


def test_a_strict_program_may_save_and_load_any_mapping_of_anything(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    # With the project's own settings and cache: what is known of torch already is not read again.
    command = [sys.executable, "-m", "mypy", "--strict", str(program)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=MYPY_LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
