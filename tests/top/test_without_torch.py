"""Where torch is not installed, what needs it says how to install it, and the rest works."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

import dist_ckpt as dc

# What an environment without torch says when somebody imports it.
HIDE = """
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hidden())
import dist_ckpt as dc
"""


def run(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", HIDE + code, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("name", ["save", "load", "average", "AsyncSaver"])
def test_what_needs_torch_says_what_to_install(name: str) -> None:
    done = run(f"dc.{name}")
    told = f'ImportError: dist_ckpt.{name} needs torch: pip install "dist-ckpt[torch]"'
    assert done.stderr.splitlines()[-1].startswith(told)
    assert "No module named" not in done.stderr  # one error, and none below it


def test_the_command_that_needs_torch_says_what_to_install() -> None:
    words = ["average", "a", "b", "--to", "c"]
    done = run(f"from dist_ckpt.cli import main; main({words})")
    assert done.stderr.startswith('dist-ckpt: average needs torch: pip install "dist-ckpt[torch]"')
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)


def test_the_rest_works(tmp_path: Path) -> None:
    dc.save({"model": {"w": torch.arange(4.0)}, "lr": 1.0}, tmp_path / "ck", step=3)
    code = """
path, other = sys.argv[1:]
assert dc.verify(path).ok
dc.reshard(path, other, world_size=2)
dc.reshard(path, other, world_size=1, overwrite=True)
assert dc.Source(path, include="model") == dc.Source(path, "model")
with dc.open(other) as found:
    assert found.step == 3 and found.objects == {"lr": 1.0}
    array = found["model.w"][1:3]
    assert array.tolist() == [1.0, 2.0]
    array.torch()
"""
    done = run(code, tmp_path / "ck", tmp_path / "other")
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: Array.torch needs torch: pip install"), done.stderr


def test_the_writer_is_not_started_by_hand() -> None:
    for arguments in ([], ["what"], ["97"], ["0", "1"]):
        done = subprocess.run(
            [sys.executable, "-m", "dist_ckpt.async_save.writer", *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 2
        (line,) = done.stderr.splitlines()
        assert line == (
            "dist_ckpt.async_save.writer: dc.AsyncSaver starts this program, with a socket to a "
            "rank's trainer; to look at checkpoints, start dist-ckpt (python -m dist_ckpt)"
        )
