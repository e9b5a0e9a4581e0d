"""The benchmarks of one feature each run, and print what they say they measure."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from benchmarks import averaging, dcp, exporting, frozen
from fork_server import forked_python


def test_averages_are_measured_beside_reading_and_verifying(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    averaging.main(["--dir", str(tmp_path), "--gb", "0.001", "--rounds", "2"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["raw", "verify", "average"]
    assert all("GB/s" in line for line in lines[1:])
    assert not list(tmp_path.iterdir())


def test_saves_with_frozen_weights_write_less_where_they_are_reused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frozen, "WIDTH", 64)
    monkeypatch.setattr(frozen, "LAYERS", 2)
    frozen.main(["--dir", str(tmp_path), "--saves", "3"])
    plain, reused = capsys.readouterr().out.split("link_unchanged=")[1:]
    assert plain.count(" 0.00 MB linked") == 3
    assert reused.count("0.00 MB linked") == 2
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_exports_are_measured_beside_a_copy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", forked_python())
    exporting.main(["--dir", str(tmp_path), "--gb", "0.001", "--rounds", "1"])
    lines = capsys.readouterr().out.splitlines()
    works = [re.split(r"  +", line)[0] for line in lines[1:]]
    exports = ["as bfloat16", "copy", "for dcp", "for hf", "for torch"]
    assert sorted(works) == [*exports, "from dcp", "from hf", "from torch"]
    assert all("GB/s" in line for line in lines[1:])
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_dcp_is_measured_by_itself_and_over_our_format_with_the_phases_of_both(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["--mb", "1", "--rounds", "2", "--saves", "1", "--only", "large"]
    dcp.main(["--dir", str(tmp_path), *small])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["save", "DCP:", "DCP-on-dist_ckpt:"] + [
        "load",
        "DCP:",
        "DCP-on-dist_ckpt:",
    ] * 2
    assert all("times as fast" in line for line in lines[::3])
    assert all("write_data" in line for line in lines[1:3])
    assert "> agree" in lines[2]
    assert all("read_data" in line for line in (*lines[4:6], *lines[7:9]))
    assert all("> check" in line for line in (lines[5], lines[8]))
    assert not list(tmp_path.iterdir())
