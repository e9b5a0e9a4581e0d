"""Every block of every page of the docs, and of the README, is run as a reader would run it."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

# What the examples import is imported here, once: the ranks are forked from a process that has
# imported this module.
import torch._dynamo  # by optimizers
import torch.distributed.fsdp
import torch.distributed.tensor.parallel  # noqa: F401

import dist_ckpt.core.loading.load
import dist_ckpt.core.saving.save  # noqa: F401
from docs_blocks import RUN_BY, Block, all_blocks, code_of, write_commands
from fork_server import forked_python
from ranks import free_port, run_ranks

ROOT = Path(__file__).parents[2]
LIMIT_S = 120
README = (ROOT / "README.md").read_text()
BLOCKS = all_blocks()
# With hundreds of dependencies; their pages say which versions were tried.
TRIED_BY_HAND = {"mlflow", "ray", "torchtitan"}
# What is no program: diagrams, what a program has printed, and files that are shown.
SHOWN_ONLY = {"text", "json"}
HERE = [
    block
    for block in BLOCKS
    if not block.reason and ((block.ranks and block.page not in RUN_BY) or block.language == "sh")
]
# Pages that read what another page has saved run on the same days as that one.
READS = {"howto/look.md": "howto/runs.md", "howto/parallelism.md": "howto/runs.md"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One working folder for all examples: some read what others have saved."""
    return tmp_path_factory.mktemp("docs")


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the programs of the package."""
    return write_commands(tmp_path_factory.mktemp("commands") / "bin", forked_python())


def be_rank(_: int, program: str) -> None:
    """Run a program as torchrun would."""
    os.chdir(Path(program).parent)
    runpy.run_path(program, run_name="__main__")


def run(folder: Path, *command: str, commands: Path | None = None) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    if commands:
        environment["PATH"] = f"{commands}:{environment['PATH']}"
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        timeout=LIMIT_S,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def what_runs(block: Block) -> str:
    """Return what runs a block, or why nothing does; empty if nobody knows."""
    if block.reason or block.language in SHOWN_ONLY:
        return block.reason or "shown only"
    if block in HERE:
        return "this module"
    return "" if block.language == "sh" else RUN_BY.get(block.page, "")


def test_every_block_of_the_docs_is_run_or_says_why_not() -> None:
    assert [str(block) for block in BLOCKS if not what_runs(block)] == []
    # Each has been found: a fence that the pattern did not know would hide its block.
    fences = sum(
        len(re.findall(r"^```", page.read_text(), flags=re.M)) for page in ROOT.glob("docs/**/*.md")
    )
    assert 2 * len(BLOCKS) == fences


def test_the_tests_that_run_a_page_name_it() -> None:
    for page, test in RUN_BY.items():
        assert f'"{page}"' in (ROOT / test).read_text(), page


def test_a_reason_names_what_runs_it_elsewhere() -> None:
    reasons = [block.reason for block in BLOCKS if block.note.startswith("not run here")]
    assert reasons
    for reason in reasons:
        (test,) = re.findall(r"(?:tests|scripts)/[\w/]+\.(?:py|sh)", reason)
        assert (ROOT / test).exists(), reason


def test_what_the_docs_install_is_what_is_tested() -> None:
    pinned = set(re.findall(r"^([\w-]+)==", (ROOT / "constraints.txt").read_text(), flags=re.M))
    for block in BLOCKS:
        for line in block.code.splitlines():
            if line.startswith("pip install "):
                words = re.findall(r"(?<=[ '\"])[\w-]+", line.removeprefix("pip install"))
                packages = {word for word in words if not word.startswith("-")}
                ours = {"dist_ckpt", "dist-ckpt"}
                assert packages <= pinned | ours | TRIED_BY_HAND, str(block)
                if packages & TRIED_BY_HAND:
                    assert "It was tried with" in (ROOT / "docs" / block.page).read_text()


@pytest.mark.multi_process
@pytest.mark.parametrize(
    "block",
    [
        pytest.param(block, marks=pytest.mark.sampled(3, READS.get(block.page, block.page)))
        for block in HERE
    ],
    ids=str,
)
def test_a_block_of_the_docs_runs(block: Block, folder: Path, commands: Path) -> None:
    if block.language == "sh":
        run(folder, "bash", "-euo", "pipefail", "-c", block.code, commands=commands)
        return
    if "torchdata" in block.code:
        pytest.importorskip("torchdata")
    program = folder / "program.py"
    program.write_text(block.code)
    for ranks in block.ranks:
        if ranks > 1:
            place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
            run_ranks(
                be_rank, str(program), world_size=ranks, store=None, launched=True, environ=place
            )
        elif "sys.modules" in block.code:  # what it has not imported is what it is about
            run(folder, sys.executable, str(program))
        else:
            run_ranks(be_rank, str(program), world_size=1, store=None)


# What the README takes for granted: a job that trains.
JOB = """
import torch
from safetensors.torch import save_file

model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8))
optimizer = torch.optim.AdamW(model.parameters())
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
samples = 0
model(torch.ones(2, 64)).sum().backward()
optimizer.step()
save_file(model.state_dict(), "model.safetensors")


def train(step: int) -> None:
    optimizer.step()
"""


@pytest.mark.multi_process
def test_what_the_readme_shows_runs(tmp_path: Path, commands: Path) -> None:
    program = tmp_path / "readme.py"
    program.write_text(JOB + "".join(code_of(README, "python")))
    run(tmp_path, forked_python(), str(program))
    lines = re.findall(r"^dist-ckpt [^\n]*", "".join(code_of(README, "sh")), flags=re.M)
    assert lines
    run(tmp_path, "bash", "-euo", "pipefail", "-c", "\n".join(lines), commands=commands)
