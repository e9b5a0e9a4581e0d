"""What opens a user's path: the core gets it at the front door, and a load imports no reader."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import dist_ckpt as dc
from dist_ckpt.core.checkpoint.checkpoint import open as open_native
from dist_ckpt.default_opener import OPENER


def test_the_front_door_gives_the_opener_to_each_function_of_the_core_that_takes_one() -> None:
    functions = {name: getattr(dc, name) for name in dc.__all__ if dc._MODULES.get(name)}
    taking = {
        name
        for name, public in functions.items()
        if inspect.isfunction(public) and "opener" in inspect.signature(public).parameters
    }
    assert taking == dc._WITH_OPENER
    for name in taking:
        assert functions[name] is getattr(dc, name)  # one function, each time it is asked for
        assert functions[name].__module__ == "dist_ckpt"  # where a pickle of it looks
        assert inspect.signature(functions[name]).parameters["opener"].default is OPENER


def test_a_function_of_the_core_alone_opens_no_selector_and_no_other_systems_files(
    tmp_path: Path,
) -> None:
    dc.save({"x": 1}, tmp_path / "run" / "s1", step=1)
    with dc.open(f"{tmp_path}/run@latest") as ck:
        assert ck.step == 1
    with pytest.raises(dc.NotFoundError):
        open_native(f"{tmp_path}/run@latest")
    with open_native(f"{tmp_path}/run@latest", opener=OPENER) as ck:
        assert ck.step == 1


@pytest.mark.multi_process
def test_a_load_imports_no_reader_of_another_systems_files(tmp_path: Path) -> None:
    dc.save({"x": 1}, tmp_path / "ck")
    code = (
        "import sys, dist_ckpt as dc; state = {'x': 0}; dc.load(state, sys.argv[1]); "
        "assert state == {'x': 1}; print(*(m for m in sys.modules if 'dist_ckpt.interop' in m))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "ck")]
    done = subprocess.run(command, timeout=120, check=True, capture_output=True, text=True)
    assert set(done.stdout.split()) == {"dist_ckpt.interop", "dist_ckpt.interop.registry"}


@pytest.mark.parametrize("name", ["hf.read", "dcp.read", "frameworks.read_deepspeed"])
def test_each_reader_that_the_table_names_is_there(name: str) -> None:
    registry = importlib.import_module("dist_ckpt.interop.registry")
    assert registry.reader_module(name).__name__ == f"dist_ckpt.interop.{name}"
    for found in registry.FORMATS.values():
        assert callable(registry.reader_module(found.reader).read)
