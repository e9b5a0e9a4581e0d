"""Fixtures for the tests that damage a checkpoint."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """Return the attempt's folder of a copy of the checkpoint that a module has `made`."""
    shutil.copytree(made.parent, tmp_path / "ck")
    return tmp_path / "ck" / made.name
