"""The benchmarks of one feature each run, and print what they say they measure."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from benchmarks import averaging, frozen


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
    plain, reused = capsys.readouterr().out.split("reuse=")[1:]
    assert plain.count(" 0.00 MB linked") == 3
    assert reused.count("0.00 MB linked") == 2
    assert not list(tmp_path.iterdir())
