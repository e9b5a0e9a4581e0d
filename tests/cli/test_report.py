"""The command that writes a page: report."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch

import dist_ckpt as dc
from dist_ckpt.errors import StorageError


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    dc.save({"model": {"w": torch.ones(9)}}, tmp_path / "run" / "s1", step=1)
    return tmp_path / "run" / "s1"


def test_a_page_is_written_and_replaced(run, saved, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        code, out, err = run("report", saved)
        assert (code, out, err) == (
            0,
            "report.html: one checkpoint, 0 problems by the quick check\n",
            "",
        )
    assert (tmp_path / "report.html").stat().st_size > 1_000_000
    code, out, _ = run("report", saved.parent, "-o", "run.html", "--verify", "none")
    assert (code, out) == (0, "run.html: 1 checkpoint\n")


def test_a_dry_run_says_what_would_be_written(run, saved, tmp_path):
    page = tmp_path / "page.html"
    assert run("report", saved, "-o", page, "--dry-run") == (0, f"{page}: would be written\n", "")
    assert not page.exists()
    assert run("report", saved, "-o", page)[0] == 0
    assert run("report", saved, "-o", page, "--dry-run")[1] == f"{page}: would be replaced\n"
    page.write_text("mine")
    for words in ((saved, "-o", page), (tmp_path / "gone", "-o", tmp_path / "b.html")):
        assert run("report", *words, "--dry-run")[::2] == run("report", *words)[::2]
    assert page.read_text() == "mine"
    assert run("report", saved, "--dry-run", "--json")[0] == 2


def test_damage_is_a_finding_and_the_page_is_there(run, saved, tmp_path):
    (file,) = saved.glob("a*/*.safetensors")
    file.write_bytes(file.read_bytes()[:-1])
    for path in (saved, saved.parent):
        page = tmp_path / f"{path.name}.html"
        code, out, _ = run("report", path, "-o", page)
        assert code == 1
        assert page.exists()
    assert "1 damaged" in out


def test_json_prints_the_facts_and_writes_nothing(run, saved, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "plotly", None)  # it needs no charts
    for path, about in ((saved, "checkpoint"), (saved.parent, "run")):
        code, out, _ = run("report", path, "--json")
        document = json.loads(out)
        assert (code, document["schema"], document["about"]) == (0, "dist-ckpt.report/2", about)
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize("missing", ["plotly.offline", "jinja2"])
def test_without_the_extra_it_says_what_to_install(missing, run, saved, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, missing, None)
    code, _, err = run("report", saved, "-o", tmp_path / "page.html")
    assert code == 2
    assert 'pip install "dist-ckpt[report]"' in err
    assert not (tmp_path / "page.html").exists()


def test_what_the_page_lacks_is_said_before_anything_is_checked(run, saved, tmp_path, monkeypatch):
    def check(*_, **__):
        raise AssertionError("it would have taken hours")

    monkeypatch.setattr("dist_ckpt.tools.report.report_content.verify", check)
    (tmp_path / "notes.html").write_text("mine")
    assert run("report", saved, "-o", tmp_path / "notes.html")[0] == 5
    assert run("report", saved, "-o", tmp_path / "no" / "page.html")[0] == 3
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    assert run("report", saved, "-o", tmp_path / "page.html")[0] == 2


def test_what_could_not_be_checked_is_not_called_whole(run, saved, tmp_path, monkeypatch):
    page, root = tmp_path / "page.html", saved.parent

    def fail(*_, **__):
        raise StorageError("the disk does not answer")

    monkeypatch.setattr("dist_ckpt.tools.report.report_content.verify", fail)
    code, out, _ = run("report", root, "-o", page)
    assert (code, out) == (
        5,
        f"{page}: 1 checkpoint, 0 damaged by a quick check, 1 could not be checked\n",
    )
    assert "no damage found" not in page.read_text()
    assert "1 checkpoint could not be checked" in page.read_text()
    code, out, _ = run("report", saved, "-o", page)
    assert (code, "not checked: the disk does not answer" in out) == (5, True)
    monkeypatch.undo()
    (index,) = saved.glob("a1-*/index.json")
    index.write_text('{"format":{"version":2},"digest":"00"}')
    assert run("report", root, "-o", page)[0] == 4
    assert run("report", root, "-o", page, "--verify", "none")[0] == 0


def test_a_page_and_a_document_are_not_asked_for_at_once(run, saved, tmp_path):
    code, _, err = run("report", saved, "--json", "-o", tmp_path / "page.html")
    assert (code, "--json writes no page" in err) == (2, True)


def test_bad_places_are_refused_by_name(run, saved, tmp_path):
    (tmp_path / "notes.html").write_text("mine")
    cases = [
        ((tmp_path / "none",), 3, "none does not exist: check its spelling"),
        ((saved, "-o", tmp_path), 2, "is a folder: give the name of a file"),
        ((saved, "-o", tmp_path / "notes.html"), 5, "something is there already"),
        ((saved, "-o", tmp_path / "no" / "page.html"), 3, "the folder does not exist"),
        ((saved, "--verify", "deep"), 2, "'deep' is not one of"),
        ((f"{saved.parent}@99",), 3, "99"),
    ]
    for arguments, code, told in cases:
        found, _, err = run("report", *arguments)
        assert (found, told in err) == (code, True), err
        assert "Traceback" not in err
    assert (tmp_path / "notes.html").read_text() == "mine"


def test_a_quick_check_does_not_call_whole_what_a_full_one_has_found(run, saved, tmp_path):
    (file,) = saved.glob("a*/model-00000.safetensors")
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    dc.save({"x": 1}, saved.parent / "s2", step=2)
    report = ("report", saved.parent, "-o", tmp_path / "page.html", "--overwrite")
    assert "2 checkpoints, 0 damaged by a quick check\n" in run(*report)[1]
    run("verify", saved)
    for path, told in ((saved.parent, "2 checkpoints, 1 damaged"), (saved, "1 problem")):
        for check in ("none", "quick"):
            page = tmp_path / f"{path.name}-{check}.html"
            code, out, _ = run("report", path, "-o", page, "--verify", check)
            assert (code, f"{told}\n" in out) == (1, True)
            assert "model.w rows" in page.read_text()
            assert re.search("newest good (one|checkpoint).*s2<", page.read_text())
    file.write_bytes(data)
    assert "2 checkpoints, 1 damaged\n" in run(*report)[1]
    assert "2 checkpoints, 0 damaged\n" in run(*report, "--verify", "full")[1]
    assert "2 checkpoints, 0 damaged by a quick check\n" in run(*report)[1]
