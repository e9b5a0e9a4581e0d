"""What several files of tests of the Checkpointer share."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from run_training import clear_memory


@pytest.fixture
def alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Run as one process, whose log is seen, and leave nothing in memory."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    caplog.set_level(logging.INFO, logger="dist_ckpt")
    yield
    clear_memory(tmp_path)
