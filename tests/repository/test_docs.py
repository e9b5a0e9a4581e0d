"""What README, how-to and the page for users of DCP show is run as a reader would run it."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

# What the examples import is imported here, once: the ranks are forked from a process that has
# imported this module.
import torch._dynamo  # by optimizers
import torch.distributed.fsdp
import torch.distributed.tensor.parallel  # noqa: F401

import dist_ckpt.loading.load
import dist_ckpt.saving.save  # noqa: F401
from ranks import free_port, run_ranks

ROOT = Path(__file__).parents[2]
LIMIT_S = 120


@dataclass(frozen=True)
class Example:
    """One program of the how-to, and on how many ranks it is run, one run after the other."""

    heading: str
    code: str
    ranks: tuple[int, ...]


def examples_of(text: str) -> list[Example]:
    """Read the programs that stand below a line `<!-- run on N ranks, then on M -->`."""
    found = []
    heading = ""
    pattern = r"^## ([^\n]*)$|^<!-- run on ([^\n]*) -->\n```python\n(.*?)^```$"
    parts = re.split(pattern, text, flags=re.M | re.S)
    for title, ranks, code in zip(parts[1::4], parts[2::4], parts[3::4], strict=True):
        heading = title or heading
        if code:
            found.append(Example(heading, code, tuple(int(n) for n in re.findall(r"\d+", ranks))))
    return found


def blocks_of(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.M | re.S)


README = (ROOT / "README.md").read_text()
HOWTO = (ROOT / "docs" / "howto.md").read_text()
FROM_DCP = (ROOT / "docs" / "from-dcp.md").read_text()
EXAMPLES = [*examples_of(HOWTO), *examples_of(FROM_DCP)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One working folder for all examples: some read what others have saved."""
    return tmp_path_factory.mktemp("docs")


def be_rank(_: int, program: str) -> None:
    """Run a program as torchrun would."""
    os.chdir(Path(program).parent)
    runpy.run_path(program, run_name="__main__")


def run(folder: Path, *command: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=environment,
        timeout=LIMIT_S,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_program_says_how_it_is_run() -> None:
    assert len(EXAMPLES) == len([*blocks_of(HOWTO, "python"), *blocks_of(FROM_DCP, "python")])
    assert all(example.ranks for example in EXAMPLES)


@pytest.mark.multi_process
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.heading)
def test_a_program_of_the_docs_runs(example: Example, folder: Path) -> None:
    if "torchdata" in example.code:
        pytest.importorskip("torchdata")
    program = folder / "program.py"
    program.write_text(example.code)
    for ranks in example.ranks:
        if ranks == 1:
            run(folder, str(program))
        else:
            place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
            run_ranks(ranks, be_rank, str(program), store=None, launched=True, environ=place)


# What the README takes for granted: a job that trains.
JOB = """
import torch

model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8))
optimizer = torch.optim.AdamW(model.parameters())
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
samples = 0
model(torch.ones(2, 64)).sum().backward()
optimizer.step()


def train(step: int) -> None:
    optimizer.step()
"""


@pytest.mark.multi_process
def test_what_the_readme_shows_runs(folder: Path) -> None:
    program = folder / "readme.py"
    program.write_text(JOB + "".join(blocks_of(README, "python")))
    run(folder, str(program))
    commands = re.findall(r"^dist-ckpt ([^#\n]*)", "".join(blocks_of(README, "sh")), flags=re.M)
    assert commands
    for command in commands:
        run(folder, "-m", "dist_ckpt", *command.split())


@pytest.mark.multi_process
def test_the_commands_for_users_of_dcp_run(folder: Path) -> None:
    # Their folder is what the program above them has made.
    assert (folder / "old" / "step-7").exists() or pytest.skip("needs the program above them")
    for command in re.findall(r"^dist-ckpt (.*)$", "".join(blocks_of(FROM_DCP, "sh")), flags=re.M):
        run(folder, "-m", "dist_ckpt", *command.split())
    assert (folder / "back-again" / ".metadata").exists()
