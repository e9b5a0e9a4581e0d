"""Everything on the page docs/tutorial.md is run, in order, and prints what stands there."""

from __future__ import annotations

import doctest
import os
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from docs_blocks import DOCS, ROOT, Block, blocks_of_page, write_commands
from fork_server import forked_python
from torch_can import of_the_pinned_torch

LIMIT_S = 180
BLOCKS = blocks_of_page(DOCS / "tutorial.md")
# What another machine, or another run, has otherwise.
OTHERWISE = (
    (r"\ba\d+-[0-9a-f]{16}\b", "ATTEMPT"),
    (r"\b[0-9a-f]{16}\b", "DIGEST"),
    (r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC", "TIME"),
    (r"\b\d+ (s|min)\b", "AGE"),
    (r"\bpid: \d+", "PID"),
    (r"\bloss +\d+\.\d+", "LOSS"),
    # Metrics are put down beside a checkpoint once it is committed: a kill may come between.
    (r" +loss=\d+\.\d+", ""),
    (r" +METRICS\b", ""),
    # Or the snapshot of the same step, if the writers of the killed job still hold it.
    (r"the newest, from memory\b", "the newest"),
    (r"\btorch 2\.\d+\.\d+(\+\w+)?", "TORCH"),
)


def masked(text: str) -> str:
    for pattern, word in OTHERWISE:
        text = re.sub(pattern, word, text)
    return text


def commands_of(block: Block) -> Iterator[tuple[str, str]]:
    """Yield each command of a console, and what it prints."""
    for part in re.split(r"^\$ ", block.code, flags=re.M)[1:]:
        command, _, printed = part.partition("\n")
        yield command, printed


def run(command: str, folder: Path, commands: Path) -> str:
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env={**environ, "PATH": f"{commands}:{environ['PATH']}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=LIMIT_S,
        text=True,
        check=False,
    )
    return done.stdout.replace(str(folder), "/home/me")


def check_printed(command: str, printed: str, wanted: str) -> None:
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    # A line of ellipsis may stand for no line.
    wanted = re.sub(r"^\.\.\.\n", "...", masked(wanted), flags=re.M)
    good = doctest.OutputChecker().check_output(wanted.strip(), masked(printed).strip(), options)
    assert good, f"$ {command}\n{printed}\n--- the page has:\n{wanted}"


def wait_for(checkpoint: Path) -> None:
    """Wait until a checkpoint is committed."""
    until = time.monotonic() + LIMIT_S
    while not [*checkpoint.glob("*/index.json")]:
        assert time.monotonic() < until, f"{checkpoint} is not committed"
        time.sleep(0.05)


@of_the_pinned_torch
@pytest.mark.multi_process
@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.timeout(540)
def test_the_tutorial_goes_as_it_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "me"
    folder.mkdir()
    commands = write_commands(tmp_path / "bin", forked_python())
    for block in BLOCKS:
        if block.note.startswith("the file "):
            (folder / block.note.removeprefix("the file ")).write_text(block.code)
        elif block.language == "console":
            for command, wanted in commands_of(block):
                check_printed(command, run(command, folder, commands), wanted)
                if command.startswith("DIE_AT="):  # the writers of the killed job still write
                    wait_for(folder / "runs" / "first" / "step-00000040")
    assert (folder / "run.html").stat().st_size > 1_000_000


def test_every_command_of_the_tutorial_is_found() -> None:
    text = (DOCS / "tutorial.md").read_text()
    found = [command for block in BLOCKS for command, _ in commands_of(block)]
    assert len(found) == len(re.findall(r"^\$ ", text, flags=re.M)) > 10
