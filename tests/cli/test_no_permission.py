"""A step that this user may not read or remove is named; the commands go on with the others."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import dist_ckpt as dc
from commands import open_attempt
from dist_ckpt.errors import StorageError

NOBODY = 65534
OLD = (1e9, 1e9)


@pytest.fixture
def root() -> Iterator[Path]:
    """Return a run of four steps; only its owner comes there."""
    with tempfile.TemporaryDirectory() as folder:  # in tmp_path, no other user comes
        for step in (1, 2, 3, 4):
            dc.save({"model": {"w": torch.ones(4)}, "lr": step}, f"{folder}/s{step}", step=step)
        dc.Run(folder).pin(2, "the paper")
        dc.Run(folder).metrics(4, {"loss": 1.0})
        yield Path(folder)


@pytest.fixture
def forbid(root: Path) -> Iterator[Any]:
    """Return a function that removes the permissions of a path and drops the rights of root."""
    changed: list[Path] = []
    is_root = os.geteuid() == 0

    def forbid(path: Path, mode: int = 0) -> None:
        changed.append(path)
        path.chmod(mode)
        for one in (root, *root.rglob("*")) if is_root else ():
            os.chown(one, NOBODY, -1)
        if is_root:
            os.seteuid(NOBODY)

    yield forbid
    if is_root:
        os.seteuid(0)
    for path in changed:
        path.chmod(0o700)


def test_ls_lists_the_others(run, root, forbid) -> None:
    forbid(root / "s2")
    code, out, _ = run("ls", root)
    assert (code, len(out.splitlines())) == (5, 7)
    states = {row["name"]: row["state"] for row in _json(run("ls", root, "--json"))["checkpoints"]}
    assert states == {"s1": "committed", "s2": "unreadable", "s3": "committed", "s4": "committed"}
    assert f"s2: {root}/s2: Permission denied (EACCES)" in out


def test_verify_checks_the_others(run, root, forbid) -> None:
    forbid(root / "s2")
    code, out, _ = run("verify", root)
    assert code == 5
    assert f"note     {root}/s2: {root}/s2: Permission denied (EACCES)" in out
    assert out.endswith("3 checkpoints checked, 0 damaged\n")


@pytest.mark.parametrize("name", ["model-00000.safetensors", "objects.msgpack", "claim.json"])
def test_a_file_that_may_not_be_read_is_not_called_damaged(run, root, forbid, name) -> None:
    (file,) = root.glob(f"s2/a*/{name}")
    forbid(file)
    code, out, _ = run("verify", root / "s2")
    assert (code, "DAMAGED" in out) == (5, False)
    assert f"UNREAD   {file}: Permission denied (EACCES)" in out
    assert "load an older one" not in out
    document = _json(run("verify", root, "--json"), is_ok=False)
    assert [row["is_unread"] for row in document["checkpoints"][1]["problems"]][:1] == [True]
    assert run("verify", root)[1].endswith(
        "4 checkpoints checked, 0 damaged, 1 not read completely\n"
    )
    assert [info.damage for info in dc.checkpoints(root)] == [None] * 4
    assert run("report", root, "--json")[0] == 5


def test_prune_removes_others_but_nothing_that_it_could_not_read(run, root, forbid) -> None:
    for record in root.glob(".annotations/2/*/*"):
        os.utime(record, OLD)  # so old that it goes with its checkpoint
    forbid(root / "s2")
    for words in (("--dry-run",), ("--yes",)):
        code, out, _ = run("prune", root, "--keep", "last(1)", *words)
        assert code == 5
        assert f"kept  s2  it cannot be read: {root}/s2: Permission denied (EACCES)" in out
        assert "2 removed" in out.replace("would be ", "")
    os.seteuid(os.getuid())
    (root / "s2").chmod(0o700)
    assert [(info.step, info.pin) for info in dc.checkpoints(root)] == [(2, "the paper"), (4, None)]


def test_prune_removes_others_than_what_it_may_not_remove(run, root, forbid) -> None:
    forbid(root / "s1", 0o555)
    code, out, _ = run("prune", root, "--keep", "last(1)", "--yes")
    assert (code, [info.step for info in dc.checkpoints(root)]) == (5, [1, 2, 4])
    assert "kept  s1  this user may not remove it: " in out


@pytest.mark.parametrize("is_dry", [True, False])
def test_gc_collects_what_it_may(run, root, forbid, is_dry) -> None:
    open_attempt(root / "dead")
    forbid(root / "s2")
    code, out, err = run("gc", root, "--grace", "0", *["--dry-run"] * is_dry)
    assert (code, "1 removed" in out.replace("would be ", "")) == (5, True)
    assert err.startswith(f"dist-ckpt: {root}/s2: Permission denied (EACCES)")
    assert (root / "dead").exists() == is_dry


def test_rm_removes_beside_what_it_may_not_read(run, root, forbid) -> None:
    forbid(root / "s2")
    assert run("rm", root / "s4", "--yes")[:2] == (0, f"deleted {root}/s4\n")


def test_no_selector_passes_over_what_may_be_the_newest(root, forbid) -> None:
    forbid(root / "s4")
    for selector in ("@latest", "@3"):
        with pytest.raises(StorageError, match=r"s4: Permission denied \(EACCES\)"):
            dc.Run(root).find(selector)


def _json(done: tuple[int, str, str], *, is_ok: bool = True) -> Any:
    assert done[0] == 5
    document = json.loads(done[1])
    assert document.get("ok", True) == is_ok
    return document
