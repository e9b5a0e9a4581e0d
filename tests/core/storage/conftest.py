"""Fixtures for the tests of direct I/O."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dist_ckpt.core.storage.local.direct_io import alignment_of


@pytest.fixture
def path(tmp_path: Path) -> str:
    """Return the path of a file to be, on a file system that takes direct I/O."""
    with open(tmp_path / "probe", "wb") as probe:
        if alignment_of(probe.fileno()) is None:
            pytest.skip("the file system of the tests takes no direct I/O")
    os.unlink(tmp_path / "probe")
    return f"{tmp_path}/f"
