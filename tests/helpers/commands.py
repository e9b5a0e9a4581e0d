"""How tests run a command: in this process. A folder of tests that does imports `run`."""

from __future__ import annotations

from collections.abc import Callable

import pytest

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
