"""How tests run a command: in this process. A folder of tests that does imports `run`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import dist_ckpt as dc
from dist_ckpt.cli import main


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Return what runs a command, and returns its exit code, output and errors."""

    def run(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as done:
            main([str(one) for one in arguments])
        out, err = capsys.readouterr()
        return int(done.value.code or 0), out, err

    return run


def damage(path: Path) -> Path:
    """Flip a bit in the last byte of the model's shard file."""
    (file,) = path.glob("a1-*/model-00000.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    return file


def open_attempt(path: Path) -> None:
    """Leave what a save leaves that died after its claim."""
    folder = path / "a1-0123456789abcdef"
    folder.mkdir(parents=True)
    (folder / "claim.json").write_text("{}")


def steps(root: Path) -> list[int | None]:
    return [one.step for one in dc.checkpoints(root)]
