"""What docs/command-line.md shows is run as a reader would run it."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import click
import pytest
import torch

import dist_ckpt as dc
from dist_ckpt.cli import cli, output

Run = Callable[..., tuple[int, str, str]]

PAGE = (Path(__file__).parents[2] / "docs" / "command-line.md").read_text()
ROWS = re.findall(r"^\| (`[^|]+) \|[^|]+\| `dist-ckpt ([^`]+)` \|$", PAGE, flags=re.M)
BLOCKS = re.findall(r"^dist-ckpt (.+)$", PAGE, flags=re.M)

# Two runs differ; a job that nobody runs does not answer.
FOUND = {"diff": output.PROBLEM_FOUND, "request-save": output.REFUSED}
# These would wait.
ENDS = {"watch": ["--once"], "request-save": ["--timeout", "0"]}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the runs that the page takes for granted."""
    made = tmp_path_factory.mktemp("made")
    for name in (made / "runs/a", made / "runs/b", made / "sweep/x", made / "sweep/y"):
        for number, step in enumerate((1000, 11000, 12000)):
            model = torch.nn.Linear(4, 4)
            optim = torch.optim.AdamW(model.parameters())
            model(torch.ones(1, 4)).sum().backward()
            optim.step()
            state = {"model": model, "optim": optim}
            dc.save(state, name / f"step-{step:08}", step=step, config={"lr": number})
            dc.Run(name).metrics(step, {"val/loss": 1.0 / step})
        with dc.Checkpointer(name, save=dc.every(steps=1000), background=False) as job:
            assert job.restore(state) == 12000
    return made


@pytest.fixture
def folder(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Go where those runs are, or as good as those."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    return tmp_path


def test_the_page_shows_every_command() -> None:
    shown = {name for names, _ in ROWS for name in re.findall(r"`([\w-]+)`", names)}
    assert shown == {*cli.list_commands(click.Context(cli))}


@pytest.mark.parametrize("command", [*(example for _, example in ROWS), *BLOCKS])
def test_what_the_page_shows_runs(command: str, folder: Path, run: Run) -> None:
    assert folder.is_dir()
    if command.startswith("report"):
        pytest.importorskip("plotly")
    name, *given = shlex.split(command.split(" >> ", 1)[0])
    code, _, errors = run(name, *given, *ENDS.get(name, []))
    assert code == FOUND.get(name, output.FINE), errors
