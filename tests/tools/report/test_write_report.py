"""The facts of a report, and the file with the page."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

import dist_ckpt as dc
from dist_ckpt.core.format.filenames import parse_attempt
from dist_ckpt.core.storage import open_storage
from dist_ckpt.errors import ExistsError, NotFoundError, StorageError
from dist_ckpt.reports import IoCount, SaveReport
from dist_ckpt.runs.listing import list_run
from dist_ckpt.runs.metrics import put_saved, save_times
from dist_ckpt.testing.memory_storage import MemoryStorage
from dist_ckpt.tools.report import write_report as written
from dist_ckpt.tools.report.write_report import START, report_facts, write_report

HOSTILE = "</script><script>alert(1)</script>"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Return a small checkpoint with everything that a page tells of."""
    state = {
        "model": {"w": torch.ones(30, 4), "b": torch.ones(3, dtype=torch.bfloat16)},
        "optim": {"m": torch.ones(60)},
        "epoch": 3,
    }
    (tmp_path / "notes.txt").write_text("so it went")
    path = tmp_path / "saved"
    options: Any = {"config": {"lr": 0.1, "deep": {"n": 2}}, "kind": "baseline"}
    dc.save(
        state,
        path,
        step=5,
        metadata={"by": "us"},
        attach={"notes.txt": tmp_path / "notes.txt"},
        **options,
    )
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a run: one pinned, one tagged, one damaged, one left by a save that died."""
    root = tmp_path / "run"
    for step in (1, 2, 3, 4):
        dc.save({"x": torch.ones(50 * step)}, root / f"s{step}", step=step)
        dc.Run(root).metrics(step, {"loss": 1.0 / step, "odd": float("nan")})
    run = dc.Run(root)
    run.pin(1, "the paper")
    run.tag(2, "release")
    cut(root / "s3")
    (root / "s5" / "a1-0123456789abcdef").mkdir(parents=True)
    (root / "s5" / "a1-0123456789abcdef" / "claim.json").write_text("{}")
    return root


def cut(path: Path) -> None:
    (file,) = path.glob("a*/*.safetensors")
    file.write_bytes(file.read_bytes()[:-8])


def of(facts: Any, step: int) -> Any:
    return next(one for one in facts["checkpoints"] if one["step"] == step)


def a_report(seconds: dict[str, float]) -> SaveReport:
    return SaveReport(
        path="/run/s1",
        step=1,
        attempt="a1-0123456789abcdef",
        world_size=4,
        nbytes=100,
        num_tensors=1,
        num_files=1,
        seconds=seconds,
        slowest_rank=3,
        slowest_s=0.5,
        exchanges=IoCount(),
        collectives=IoCount(),
        nbytes_receipt=0,
        storage_reads=IoCount(),
        storage_writes=IoCount(),
    )


# --- facts --------------------------------------------------------------------------------------


def test_the_facts_of_a_checkpoint(saved: Path) -> None:
    facts: Any = report_facts(saved)
    assert (facts["about"], facts["step"], facts["world_size"]) == ("checkpoint", 5, 1)
    assert facts["tensor_nbytes"] == 480 + 6 + 240
    assert [(one["name"], one["nbytes"], one["dtypes"]) for one in facts["components"]] == [
        ("model", 486, {"float32": 480, "bfloat16": 6}),
        ("optim", 240, {"float32": 240}),
    ]
    assert [one["name"] for one in facts["largest"]] == ["model.w", "optim.m", "model.b"]
    assert facts["attached"] == [["notes.txt", 10]]
    assert facts["config"] == [["lr", "0.1"], ["deep.n", "2"]]
    assert facts["metadata"] == [["by", "'us'"]]
    assert facts["verification"]["result"] == "ok"
    assert facts["verification"]["level"] == "quick"
    assert facts["ranks"]["imbalance"] == 1.0
    assert sum(one["nbytes"] for one in facts["ranks"]["components"]) == facts["nbytes"]
    json.dumps(facts, allow_nan=False)


def test_who_stores_what_is_told_by_rank(saved: Path, tmp_path: Path) -> None:
    dc.reshard(saved, tmp_path / "cut", world_size=7)
    ranks: Any = report_facts(tmp_path / "cut")["ranks"]
    with dc.open(tmp_path / "cut") as ck:
        index = ck.index
    totals = [0] * 7
    for file in index.files:
        totals[file.rank] += file.nbytes
    totals[0] += sum(one.nbytes for one in index.objects)
    totals[0] += sum(one.nbytes for one in index.attached)
    assert ranks["totals"] == totals
    assert ranks["most_rank"] == totals.index(max(totals))
    assert ranks["imbalance"] == pytest.approx(max(totals) / (sum(totals) / 7))


@pytest.mark.parametrize("check", ["none", "quick", "full"])
def test_it_says_which_check_was_done(check: Any, saved: Path) -> None:
    (file,) = saved.glob("a*/optim-*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    verification: Any = report_facts(saved, check=check)["verification"]
    found = {"none": ("not checked", None), "quick": ("ok", "quick"), "full": ("damaged", "full")}
    assert (verification["result"], verification["level"]) == found[check]
    assert [one["tensor"] for one in verification["problems"]] == ["optim.m"] * (check == "full")


def test_a_check_that_is_none_is_refused(saved: Path) -> None:
    with pytest.raises(ValueError, match='give "none", "quick" or "full"'):
        report_facts(saved, check="deep")  # type: ignore[arg-type]


def test_a_damaged_index_is_told_of(saved: Path, tmp_path: Path) -> None:
    (index,) = saved.glob("a*/index.json")
    index.write_bytes(index.read_bytes()[:-100])
    facts: Any = write_report(saved, tmp_path / "page.html")
    assert facts["verification"]["result"] == "damaged"
    assert "index.json" in facts["unreadable"]
    assert "It cannot be opened" in (tmp_path / "page.html").read_text()


def test_files_of_another_system_have_a_report_without_a_check(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    from safetensors.torch import save_file

    save_file({"w": torch.ones(3)}, tmp_path / "model.safetensors")
    for place in (tmp_path, tmp_path / "model.safetensors"):
        facts: Any = report_facts(place)
        assert (facts["num_tensors"], facts["verification"]["result"]) == (1, "not checked")


def test_the_facts_of_a_run(root: Path) -> None:
    facts: Any = report_facts(root)
    assert (facts["about"], facts["num_checkpoints"], facts["num_damaged"]) == ("run", 5, 1)
    results = {one["name"]: one["result"] for one in facts["checkpoints"]}
    assert results == {"s5": "not checked", "s1": "ok", "s2": "ok", "s3": "damaged", "s4": "ok"}
    assert of(facts, 1)["protected_by"] == ["pinned: the paper"]
    assert of(facts, 2)["tags"] == ["release"]
    assert "is truncated: " in of(facts, 3)["problem"]
    loss, odd = facts["metrics"]
    assert loss["lowest"] == {"value": 0.25, "step": 4}
    assert loss["highest"] == {"value": 1.0, "step": 1}
    assert (odd["newest"], odd["lowest"]) == ({"value": "nan", "step": 4}, None)
    assert (facts["num_timed"], facts["stalled_s"], facts["longest_stall"]) == (0, None, None)
    json.dumps(facts, allow_nan=False)


def test_of_a_run_without_a_check_nothing_is_called_whole(root: Path) -> None:
    facts: Any = report_facts(root, check="none")
    assert {one["result"] for one in facts["checkpoints"]} == {"not checked"}


def test_an_empty_folder_is_a_run_without_checkpoints(tmp_path: Path) -> None:
    facts = write_report(tmp_path, tmp_path / "page.html")
    assert facts["num_checkpoints"] == 0
    assert "Nothing was saved here yet" in (tmp_path / "page.html").read_text()


def test_a_run_remembers_how_long_its_saves_took(tmp_path: Path) -> None:
    state = {"model": torch.nn.Linear(4, 4)}
    with dc.Checkpointer(tmp_path, save=dc.every(steps=1), background=False) as ck:
        for _ in ck.steps(state, until=3):
            pass
    facts: Any = report_facts(tmp_path)
    assert facts["num_timed"] == 3
    assert facts["slowest_ranks"] == [{"rank": 0, "num_saves": 3}]
    for one in facts["checkpoints"]:
        assert one["seconds"].keys() == {"agree", "write", "clean up"}
        # In the foreground the training stands still for all of it.
        assert one["stalled_s"] == pytest.approx(sum(one["seconds"].values()), abs=1e-3)
        assert 0 < one["slowest_s"] <= one["seconds"]["write"] + 1e-3
    assert facts["stalled_s"] == pytest.approx(
        sum(one["stalled_s"] for one in facts["checkpoints"])
    )
    assert [one["number"] for one in facts["incarnations"]] == [1]


def test_of_a_save_in_the_background_only_the_trainers_phases_are_a_stall() -> None:
    storage, attempt = MemoryStorage(), parse_attempt("a1-0123456789abcdef")
    assert attempt is not None
    storage.make_folder("/run")
    seconds = {"ready": 1.0, "agree": 2.0, "stage": 4.0, "claim": 8.0, "write": 16.0}
    put_saved(storage, "/run", (1, attempt), a_report(seconds))
    (times,) = save_times(list_run(storage, "/run", now=0.0).annotations).values()
    assert (times.seconds, times.stalled_s) == (seconds, 7.0)
    assert (times.slowest_rank, times.slowest_s) == (3, 0.5)


def test_the_longest_stall_and_the_slowest_ranks_come_first(root: Path) -> None:
    storage, folder = open_storage(root)
    saves = {1: (0.5, 5), 2: (2.5, 3), 3: (0.25, 3), 4: (1.0, 1)}
    for one in dc.checkpoints(root):
        if one.step and one.where:
            seconds, slowest = saves[one.step]
            report = replace(a_report({"agree": seconds}), slowest_rank=slowest)
            put_saved(storage, folder, one.where, report)
    facts: Any = write_report(root, root / "page.html")
    assert (facts["stalled_s"], facts["longest_stall"]) == (4.25, {"step": 2, "seconds": 2.5})
    assert [(one["rank"], one["num_saves"]) for one in facts["slowest_ranks"]] == [
        *((3, 2), (1, 1), (5, 1))
    ]
    row = re.search(r"<tr><td class=.name.>s2</td>.*?</tr>", (root / "page.html").read_text())
    assert row
    assert re.findall(r">([^<>]*)</td>", row[0])[-3:] == ["2.5 s", "2.5 s", "3 (500 ms)"]


def test_what_was_left_behind_says_so_and_is_the_best_of_nothing(tmp_path: Path) -> None:
    state = {"model": torch.nn.Linear(4, 4)}
    save = dc.every(steps=1)
    with dc.Checkpointer(tmp_path, save=save, background=False) as ck:
        for step in ck.steps(state, until=3):
            ck.metrics(step, {"loss": 1.0 / step})
    with dc.Checkpointer(tmp_path, save=save, background=False) as ck:
        ck.restore(state, "@2")
    facts: Any = report_facts(tmp_path)
    assert [one["is_orphaned"] for one in facts["checkpoints"]] == [False, False, True]
    (loss,) = facts["metrics"]
    assert loss["lowest"] == loss["newest"] == {"value": 0.5, "step": 2}
    assert [one["restored_step"] for one in facts["incarnations"]] == [None, 2]
    assert "orphaned" in report_facts(tmp_path / "step-00000003")["notes"]


def test_of_very_many_checkpoints_the_newest_are_shown(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dist_ckpt.tools.report.report_content.MAX_CHECKPOINTS", 2)
    facts: Any = report_facts(root)
    assert [one["step"] for one in facts["checkpoints"]] == [3, 4]
    assert (facts["num_checkpoints"], facts["num_left_out"]) == (5, 3)


def test_a_tied_tensor_is_counted_once(tmp_path: Path) -> None:
    weight = torch.ones(30)
    dc.save({"model": {"a": weight, "b": weight}}, tmp_path / "tied")
    facts: Any = report_facts(tmp_path / "tied")
    assert (facts["num_tensors"], facts["num_tied"], facts["tensor_nbytes"]) == (1, 1, 120)
    assert [(one["nbytes"], one["num_tensors"]) for one in facts["components"]] == [(120, 1)]


# --- the page -----------------------------------------------------------------------------------


class _Elements(HTMLParser):
    """Counts elements, and collects those with something that a browser would fetch or run."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.active: list[tuple[str, str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        bad = {"src", "href", "srcset", "action", "data", "style"}
        self.active += [(tag, name) for name, _ in attrs if name in bad or name.startswith("on")]


def elements(file: Path) -> _Elements:
    found = _Elements()
    found.feed(file.read_text())
    return found


def test_names_in_a_checkpoint_are_only_text(tmp_path: Path) -> None:
    state = {
        HOSTILE: {"<img src=x onerror=alert(2)>": torch.ones(5), "a\u2028b\u202e": torch.ones(1)}
    }
    told: Any = {
        "metadata": {HOSTILE: "<!-- <script>"},
        "kind": HOSTILE,
        "config": {HOSTILE: HOSTILE},
    }
    path = tmp_path / "<b>&amp;"
    dc.save(state, path, step=1, **told)
    write_report(path, tmp_path / "page.html")
    text, found = (tmp_path / "page.html").read_text(), elements(tmp_path / "page.html")
    assert found.tags.count("script") == 3
    assert found.active == []
    assert not {"img", "b", "a"} & set(found.tags)
    assert "alert(1)" in text  # it is told of,
    assert HOSTILE not in text  # and nowhere as it is
    assert "\u2028" not in text
    assert "\u202e" not in text
    data = re.search(r'id="facts">(.*?)</script>', text, re.S)
    assert data
    assert not set("<>&") & set(data[1])
    assert json.loads(data[1])["components"][0]["name"] == HOSTILE


def test_the_policy_names_the_scripts_that_are_there_and_lets_nothing_be_fetched(
    saved: Path, tmp_path: Path
) -> None:
    from base64 import b64encode
    from hashlib import sha256

    write_report(saved, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    policy = re.search(r'Security-Policy" content="(.*?)"', text)
    assert policy
    assert policy[1].startswith("default-src &#39;none&#39;; script-src &#39;sha256-")
    scripts = re.findall(r"<script>(.*?)</script>", text, re.S)
    digests = [b64encode(sha256(one.encode()).digest()).decode() for one in scripts]
    assert len(digests) == 2
    for digest in digests:
        assert f"sha256-{digest}" in policy[1].replace("&#43;", "+")


def test_a_page_is_readable_without_its_scripts(root: Path, tmp_path: Path) -> None:
    write_report(root, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    words = re.sub(r"<script.*?</script>|<style.*?</style>|<[^>]+>", " ", text, flags=re.S)
    for told in ("s3", "damaged", "pinned: the paper", "0.25", dc.__version__, " UTC"):
        assert told in words


def test_a_report_is_replaced_and_nothing_else_unasked(saved: Path, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    write_report(saved, file)
    first = file.read_bytes()
    assert first.startswith(START)
    dc.Run(tmp_path).metrics(5, {"loss": 0.125})
    write_report(saved, file)
    assert b"0.125" in file.read_bytes()
    file.write_text("my notes")
    with pytest.raises(ExistsError, match="--overwrite"):
        write_report(saved, file)
    assert file.read_text() == "my notes"
    write_report(saved, file, overwrite=True)
    assert file.read_bytes().startswith(START)


def test_a_folder_or_a_link_is_no_place_for_a_report(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "link.html").symlink_to(tmp_path / "elsewhere")
    for name, kind in (("saved", "folder"), ("link.html", "link")):
        with pytest.raises(ValueError, match=f"is a {kind}: give the name of a file"):
            write_report(saved, tmp_path / name, overwrite=True)
    assert not (tmp_path / "elsewhere").exists()


def test_a_crash_leaves_the_older_page_whole(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "page.html"
    write_report(saved, file)
    before = file.read_bytes()

    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(StorageError, match="No space left"):
        write_report(saved, file)
    monkeypatch.undo()
    assert file.read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == ["notes.txt", "page.html", "saved"]


def test_nothing_there_is_an_error_and_no_page(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        write_report(tmp_path / "none", tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


def test_a_script_that_would_end_in_its_middle_is_refused() -> None:
    with pytest.raises(ValueError, match="has an end tag or a comment"):
        written._check_script("var a = '</SCRIPT>'")


@pytest.mark.sampled(3)
def test_of_a_hundred_thousand_tensors_the_page_stays_small(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with dc.open(saved) as ck:
        info = ck.tensors["model.w"]
    many = {f"model.{i % 100}.{'x' * 50}.{i}": info for i in range(100_000)}
    monkeypatch.setattr("dist_ckpt.core.checkpoint.checkpoint.Checkpoint.tensors", many)
    facts = written.report_facts(saved)
    assert len(json.dumps(facts)) < 1_000_000
    assert facts["num_tensors"] == 100_000
    assert "And 99,975 more tensors" in written.render_page(facts).decode()
