"""`dist-ckpt upgrade`, and what other commands say of a root that is to be upgraded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from dist_ckpt.cli import output
from dist_ckpt.core.commit.records.record_store import warn_of_old

Run = Callable[..., tuple[int, str, str]]

GOLDEN = Path(__file__).parents[1] / "golden" / "root-of-0.1.0"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    warn_of_old.cache_clear()
    return Path(shutil.copytree(GOLDEN, tmp_path / "run"))


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.name.startswith("."))


def test_it_asks_where_an_old_job_may_be_alive(root: Path, run: Run) -> None:
    code, told, errors = run("upgrade", root)
    assert (code, told) == (output.REFUSED, "")
    assert "process 1445 on host has a lease on step 3" in errors
    assert "--yes" in errors
    assert names(root) == [".facts", ".starts"]


def test_a_dry_run_changes_nothing_and_the_upgrade_says_what_it_did(root: Path, run: Run) -> None:
    code, told, _ = run("upgrade", root, "--dry-run")
    assert code == 0
    assert told.splitlines() == [
        "may use it: process 1445 on host has a lease on step 3",
        f"{root}: 16 annotations and 2 incarnations would be converted",
    ]
    assert names(root) == [".facts", ".starts"]
    code, told, errors = run("upgrade", root, "--yes")
    assert (code, errors) == (0, "")
    assert told == f"{root}: 16 annotations and 2 incarnations converted\n"
    assert names(root) == [".annotations", ".incarnations"]
    assert run("upgrade", root)[:2] == (0, f"{root}: nothing to upgrade\n")


def test_the_document_names_the_folders(root: Path, run: Run) -> None:
    document = json.loads(run("upgrade", root, "--yes", "--json")[1])
    assert document["folders"] == [*(f"{root}/backup/.facts", f"{root}/.facts", f"{root}/.starts")]
    assert (document["num_annotations"], document["num_incarnations"]) == (16, 2)


@pytest.mark.parametrize(
    "command",
    [
        *(
            "pin {}@1",
            "tag {}@1 x",
            "rm {}@1 --yes",
            "rm {}@1 --dry-run",
            "gc {}",
            "gc {} --dry-run",
        ),
        *("prune {} --keep last(1) --yes", "strip {}@1 n --yes", "strip {}@1 n --dry-run"),
        *("backup {}@1", "backup {}@1 --dry-run", "cp {}@1 {}/x", "cp {}@1 {}/x --dry-run"),
        *("request-save {}", "reshard {}@1 {}/x --world-size 2"),
    ],
)
def test_commands_that_write_are_incompatible_and_say_what_to_do(
    command: str, root: Path, run: Run
) -> None:
    code, told, errors = run(*command.replace("{}", str(root)).split())
    assert (code, told) == (output.INCOMPATIBLE, "")
    assert f"run `dist-ckpt upgrade {root}`" in errors
    assert names(root) == [".facts", ".starts"]


@pytest.mark.parametrize(
    "command", ["ls {}", "show {}@tag:release", "watch {} --once", "verify {}"]
)
def test_commands_that_read_log_that_it_is_to_be_upgraded(
    command: str, root: Path, run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    code, told, _ = run(*command.replace("{}", str(root)).split())
    assert code == 0
    assert told
    (logged,) = [one.getMessage() for one in caplog.records]
    assert logged.endswith(f"Run `dist-ckpt upgrade {root}`")
    assert names(root) == [".facts", ".starts"]
