"""`--dry-run` of what writes: it says what the real call does, and refuses what that refuses."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import dist_ckpt as dc
from long_mode import sample

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

Run = Callable[..., tuple[int, str, str]]

# Of each command: what it is given, and which of its files are in the new folder.
CHECKPOINTS = {
    "reshard": "reshard {root}@2 {new} --world-size 3",
    "a part": "reshard {root}@2 {new} --world-size 2 -g model",
    "cp": "cp {root}@2 {new}",
    "average": "average {root} --last 2 --to {new} -g 'model.*'",
    "import dcp": "import --from dcp {base}/dcp {new} --ranks 2",
    "import torch": "import --from torch {base}/a.pt {new} --step 3",
    "import hf": "import --from hf {base}/hf {new} --exclude '*.b'",
    "import shrew": "import --from shrew {base}/a.shrew {new}",
}
EXPORTS = {
    "hf": "export --format hf {root}@2 {new} --max-shard-size 40",
    "hf, converted": "export --format hf {root}@2 {new} --dtype bf16",
    "shrew": "export --format shrew {base}/for-shrew {new}",
}


@pytest.fixture
def base(tmp_path: Path, run: Run) -> Path:
    """A run of two steps, and what other systems wrote."""
    weights = {"w": torch.arange(12.0).reshape(4, 3), "b": torch.ones(4)}
    for step in (1, 2):
        state = {"model": weights, "optim": {"m": torch.ones(3)}, "epoch": step}
        dc.save(state, tmp_path / "run" / f"s{step}", step=step)
        dc.Run(tmp_path / "run").metrics(step, {"loss": 0.5})
    dcp.save({"model": weights}, checkpoint_id=tmp_path / "dcp")
    torch.save(weights, tmp_path / "a.pt")  # noqa: TID251 - it is what users have
    (tmp_path / "hf").mkdir()
    save_file(weights, tmp_path / "hf" / "model.safetensors")
    dc.save({"model": weights}, tmp_path / "for-shrew")
    assert run("export", "--format", "shrew", tmp_path / "for-shrew", tmp_path / "a.shrew")[0] == 0
    return tmp_path


def given(command: str, base: Path, new: Path) -> list[str]:
    return shlex.split(command.format(root=base / "run", base=base, new=new))


def snapshot(base: Path) -> dict[str, int]:
    return {str(one): one.lstat().st_mtime_ns for one in [base, *base.rglob("*")]}


def sizes_in(folder: Path) -> dict[str, int]:
    (attempt,) = folder.glob("a*-*")
    files = {one.name: one.stat().st_size for one in attempt.iterdir()}
    return {name: nbytes for name, nbytes in files.items() if not name.endswith(".json")}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_dry_run_tells_which_files_a_checkpoint_gets(name: str, base: Path, run: Run) -> None:
    words = given(CHECKPOINTS[name], base, base / "new")
    before = snapshot(base)
    code, told, errors = run(*words, "--dry-run", "--json")
    assert (code, errors) == (0, "")
    assert snapshot(base) == before
    document = json.loads(told)
    assert (document["path"], document["replaces"]) == (str(base / "new"), [])
    _, text, _ = run(*words, "--dry-run")
    assert all(f"would be written  {one['name']}  " in text for one in document["files"])
    assert run(*words)[0] == 0
    assert {one["name"]: one["nbytes"] for one in document["files"]} == sizes_in(base / "new")
    (attempt,) = (base / "new").glob("a*-*")
    code, told, errors = run(*words, "--overwrite", "--dry-run", "--json")
    assert (code, errors) == (0, "")
    assert json.loads(told)["replaces"] == [str(attempt)]
    assert attempt.exists()


@pytest.mark.parametrize("name", EXPORTS)
def test_a_dry_run_tells_which_files_an_export_writes(name: str, base: Path, run: Run) -> None:
    new = base / "new"
    words = given(EXPORTS[name], base, new)
    before = snapshot(base)
    code, told, errors = run(*words, "--dry-run", "--json")
    assert (code, errors) == (0, "")
    assert snapshot(base) == before
    files = {one["name"]: one["nbytes"] for one in json.loads(told)["files"]}
    assert run(*words)[0] == 0
    written = new.iterdir() if new.is_dir() else [new]
    assert files == {one.name: one.stat().st_size for one in written}
    told = run(*words, "--overwrite", "--dry-run", "--json")[1]
    gone = [f"{new}/{name}" for name in sorted(files)] if new.is_dir() else [str(new)]
    assert json.loads(told)["replaces"] == gone


def test_a_dry_run_of_an_export_for_dcp_tells_the_least_that_it_takes(base: Path, run: Run) -> None:
    words = given("export --format dcp {root}@2 {new}", base, base / "new")
    before = snapshot(base)
    files = {
        one["name"]: one["nbytes"]
        for one in json.loads(run(*words, "--dry-run", "--json")[1])["files"]
    }
    assert snapshot(base) == before
    assert run(*words)[0] == 0
    written = {one.name: one.stat().st_size for one in (base / "new").iterdir()}
    assert files.keys() == written.keys()
    assert files["__0_0.distcp"] == (12 + 4 + 3) * 4
    assert all(nbytes <= written[name] for name, nbytes in files.items())


def test_a_dry_run_of_a_backup_knows_what_is_kept_already(base: Path, run: Run) -> None:
    kept = base / "run" / "backup" / "s2"
    before = snapshot(base)
    document = json.loads(run("backup", base / "run" / "s2", "--dry-run", "--json")[1])
    assert snapshot(base) == before
    assert document["path"] == str(kept)
    assert run("backup", base / "run" / "s2")[0] == 0
    assert {one["name"]: one["nbytes"] for one in document["files"]} == sizes_in(kept)
    document = json.loads(run("backup", base / "run" / "s2", "--dry-run", "--json")[1])
    assert (document["files"], document["replaces"]) == ([], [])


@pytest.mark.parametrize(
    "command",
    [
        "reshard {root}@2 {new} --world-size 3",
        "strip {root}/s2 optim --yes",
        "export --format dcp {root}@2 {new}",
    ],
)
def test_a_dry_run_that_finds_damage_records_nothing(command: str, base: Path, run: Run) -> None:
    (file,) = (base / "run").glob("s2/a*/objects.msgpack")
    file.write_bytes(bytes(file.stat().st_size))
    words, before = given(command, base, base / "new"), snapshot(base)
    dry = run(*words, "--dry-run")
    assert (dry[0], snapshot(base)) == (1, before)
    assert run(*words) == dry
    assert dc.Run(base / "run").find(2).damage is not None


def refusals(base: Path) -> dict[str, Path]:
    """Make targets that nothing may be written to, or only with --overwrite."""
    (base / "foreign").mkdir()
    (base / "foreign" / "notes.txt").write_text("mine")
    (base / "file").write_text("mine")
    dc.save({"x": 1}, base / "taken")
    dc.save({"x": 1}, base / "damaged")
    for index in (base / "damaged").glob("a*/index.json"):
        index.write_text("{")
    dc.save({"x": 1}, base / "other" / "s1", step=1)
    dc.Run(base / "other").tag(1, "mine")
    os.mkfifo(base / "pipe")
    (base / "link").symlink_to("file")
    names = ["foreign", "file", "file/below", "taken", "damaged", "other/s1", "gone/below"]
    names += ["pipe", "link", "run@latest", "run@7", "run@min:loss", "run/a1-0123456789abcdef"]
    return {name: base / name for name in names}


@pytest.mark.parametrize("name", [*CHECKPOINTS, *EXPORTS, "dcp", "torch"])
def test_a_dry_run_refuses_what_the_real_call_refuses(name: str, base: Path, run: Run) -> None:
    others = {name: f"export --format {name} {{root}}@2 {{new}}" for name in ("dcp", "torch")}
    command = {**CHECKPOINTS, **EXPORTS, **others}[name]
    refused = 0
    pairs = [(target, more) for target in refusals(base).values() for more in ([], ["--overwrite"])]
    for target, more in (tried := sample(pairs, 5)):
        words = [*given(command, base, target), *more]
        before = snapshot(base)
        dry = run(*words, "--dry-run")
        assert snapshot(base) == before
        code, _, errors = run(*words)
        assert (code, errors) == (dry[0], dry[2])
        refused += code != 0
    assert refused >= len(tried) * 0.6


@pytest.mark.parametrize(
    "command",
    [
        "reshard {root}@2 {new} --world-size 2 -g nothing",
        "reshard {root}@2 {new} --world-size 2 --max-memory 1kB",
        "reshard {root}@2 {root}/s2/below --world-size 2",
        "reshard {root}@2 {root}/s2 --world-size 2",
        "cp {root}@2 {root}/s2",
        "cp {base}/hf {new}",
        "average {root} --last 2 --to {new}",
        "average {root} --last 2 --to {root}/mean -g 'model.*'",
        "average {root} --best 2 --min gone --to {new}",
        "import --from dcp {base}/dcp {new} --exclude nothing",
        "import --from torch {base}/a.shrew {new}",
        "export --format hf {root}@2 {new} --only nothing",
        "export --format hf {root}@2 {new} -g nothing",
        "export --format shrew {root}@2 {new}",
        "export --format dcp {root}@9 {new}",
        "export --format torch {root}@2 {new} --only nothing",
        "export --format torch {root}@2 {new} --dtype bf16",
        "backup {root}/s9",
    ],
)
def test_a_dry_run_checks_what_is_given_as_the_real_call(
    command: str, base: Path, run: Run
) -> None:
    words = given(command, base, base / "new")
    dry, real = run(*words, "--dry-run"), run(*words)
    assert dry == real
    assert dry[0] != 0
    assert not (base / "new").exists()
