"""What holds for every command: nobody adds one that has no example, or a traceback for a user."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import click
import pytest
import torch

import dist_ckpt as dc
from dist_ckpt.cli import cli, output
from dist_ckpt.cli.commands import schema

Run = Callable[..., tuple[int, str, str]]

ROOT = Path(__file__).parents[2]

# A root of dist_ckpt 0.1.0.
GOLDEN = ROOT / "tests" / "golden" / "root-of-0.1.0"

# How each command is given a path, and somewhere to write: {path} and {new}.
WORDS = {
    "ls": "{path}",
    "show": "{path}",
    "tree": "{path}",
    "tensors": "{path}",
    "stats": "{path}",
    "layout": "{path}",
    "verify": "{path}",
    "compare": "{path}",
    "diff": "{path} {path}",
    "estimate": "--from {path}",
    "reshard": "{path} {new} --world-size 2",
    "backup": "{path}",
    "cp": "{path} {new}",
    "strip": "{path} optim --yes",
    "average": "{path} {path} --to {new}",
    "rm": "{path} --yes",
    "gc": "{path}",
    "import": "--from hf {path} {new}",
    "export": "--format hf {path} {new}",
    "prune": "{path} --keep last(1) --yes",
    "pin": "{path}",
    "tag": "{path} name",
    "request-save": "{path}",
    "upgrade": "{path}",
    "watch": "{path} --once",
    "report": "{path} -o {new}",
}
# What takes no path.
WITHOUT_PATH = {"completion", "schema"}
# A run's folder, or a checkpoint, that may be another system's: they say themselves what they miss.
OF_CHECKPOINTS = [
    *("show", "tree", "tensors", "stats", "layout", "diff", "estimate", "reshard", "backup", "cp"),
    *("strip", "rm", "export", "pin", "tag"),
]


def words(command: str, path: object, new: object) -> list[str]:
    given = WORDS[command].format(path=shlex.quote(str(path)), new=shlex.quote(str(new)))
    return [command, *shlex.split(given.replace("last(1)", "'last(1)'"))]


@pytest.fixture
def root(two_steps: Path) -> Path:
    return two_steps


def commands() -> dict[str, click.Command]:
    with click.Context(cli) as parent:
        found = {name: cli.get_command(parent, name) for name in cli.list_commands(parent)}
    return {name: command for name, command in found.items() if command is not None}


def test_every_command_is_looked_at_here() -> None:
    assert {*commands()} == {*WORDS} | WITHOUT_PATH
    files = (ROOT / "dist_ckpt" / "cli" / "commands").glob("[!_]*.py")
    assert {*commands()} == {path.stem.strip("_").replace("_", "-") for path in files}


@pytest.mark.parametrize("name", sorted(commands()))
def test_every_help_has_an_example_that_parses(name: str, run: Run) -> None:
    code, told, _ = run(name, "--help")
    assert code == 0
    examples = re.findall(r"^ *dist-ckpt (.+)$", told, flags=re.M)
    assert examples, f"{name} --help has no example"
    for example in examples:
        given = shlex.split(re.split(" >> | > ", example)[0])
        assert given[0] == name
        # Parsed, and not run: an unknown option, or one that lacks its value, is a usage error.
        with click.Context(cli) as parent:
            commands()[name].make_context(name, given[1:], parent=parent)


@pytest.mark.parametrize("name", sorted(WORDS))
def test_an_unknown_path_is_not_found(name: str, tmp_path: Path, run: Run) -> None:
    code, told, errors = run(*words(name, tmp_path / "gone" / "away", tmp_path / "new"))
    if name == "watch":  # it waits for what is not there yet
        return
    assert (code, told) == (output.NOT_FOUND, ""), errors
    assert errors.startswith("dist-ckpt: ")
    assert errors.count("\n") == 1
    assert not (tmp_path / "new").exists()
    assert not (tmp_path / "gone").exists()


@pytest.mark.parametrize("name", sorted(OF_CHECKPOINTS))
def test_what_is_no_checkpoint_is_one_line(name: str, tmp_path: Path, run: Run) -> None:
    open_attempt = tmp_path / "open" / "a1-0123456789abcdef"
    open_attempt.mkdir(parents=True)
    (open_attempt / "claim.json").write_text("{}")
    (tmp_path / "file").write_text("text")
    (tmp_path / "empty").mkdir()
    (tmp_path / "evil\x1b[2J\nx").mkdir()
    for there in ("open", "file", "empty", "evil\x1b[2J\nx", "empty@latest", "empty@min:x"):
        code, _, errors = run(*words(name, tmp_path / there, tmp_path / "new"))
        assert code in (output.NOT_FOUND, output.INCOMPATIBLE, output.IO_ERROR), errors
        assert errors.startswith("dist-ckpt: ")
        assert "\x1b" not in errors
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["stats", "diff", "cp", "reshard", "verify"])
def test_damage_is_a_finding(name: str, root: Path, tmp_path: Path, run: Run) -> None:
    for file in (root / "s1").glob("a1-*/*.safetensors"):
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    given = words(name, root / "s1", tmp_path / "new")
    code, told, errors = run(*given, *(["--values"] if name == "diff" else []))
    assert code == output.PROBLEM_FOUND
    assert "model.w" in told + errors or "model.b" in told + errors


DOCUMENTS = {
    "ls": "ls {root}",
    "show": "show {root}@2",
    "show-all": "show {root}@2 {root}@1",
    "tree": "tree {root}@2 -g model",
    "tensors": "tensors {root}@2 --sort size",
    "stats": "stats {root}@2",
    "layout": "layout {root}@2 -g '*'",
    "verify": "verify {root}@2",
    "verify-all": "verify {root}",
    "compare": "compare {root} --min loss",
    "diff": "diff {root}@1 {root}@2 --values",
    "estimate": "estimate --from {root}@2 --rate 1GB --steps 100 --save-every 10 --keep 'last(2)'",
    "prune": "prune {root} --keep 'last(1)' --dry-run",
    "gc": "gc {root} --dry-run",
    "pin": "pin {root}@1 --why paper",
    "tag": "tag {root}@min:loss best",
    "report": "report {root}@2 --verify full",
    "reshard": "reshard {root}@1 {root}-new --world-size 2",
    "cp": "cp {root}@1 {root}-new --link",
    "average": "average {root}@1 {root}@2 --to {root}-new -g model.b",
    "import": "import --from hf {root}-hf {root}-new",
    "export": "export --format hf {root}@1 {root}-new",
    "backup": "backup {root}@1",
    "strip": "strip {root}@1 optim --yes",
    "rm": "rm {root}@1 --yes",
    "dry-run": "reshard {root}@1 {root}-new --world-size 2 --dry-run",
    "watch": "watch {root} --once",
    "request-save": "request-save {root}-job",
    "upgrade": "upgrade {root}",
}
# The same document of something else.
MORE_DOCUMENTS = [
    *(("report", "report {root}"), ("report", "report {root}-damaged/s1")),
    ("verify-all", "verify {root}-damaged"),
    ("strip", "strip {root}@1 optim --dry-run"),
    ("pin", "pin {root}@1 --remove --dry-run"),
    ("rm", "rm {root}@1 --dry-run"),
    ("dry-run", "cp {root}@1 {root}/s2 --overwrite --dry-run"),
    ("dry-run", "average {root} --last 2 --to {root}-new -g model.b --dry-run"),
    ("dry-run", "import --from hf {root}-hf {root}-new --dry-run"),
    ("dry-run", "export --format hf {root}@1 {root}-new --dry-run"),
    ("dry-run", "export --format dcp {root}@1 {root}-new --dry-run"),
    ("dry-run", "backup {root}@1 --dry-run"),
    ("request-save", "request-save {root}-job --wait --timeout 0"),
    ("request-save", "request-save {root}-job --stop --dry-run"),
    ("upgrade", f"upgrade {GOLDEN} --dry-run"),
]


def test_a_document_changes_only_with_its_version() -> None:
    """After a new version, write `schemas()` into the file."""
    assert schemas() == json.loads((Path(__file__).parent / "schemas.json").read_text())


def schemas() -> dict[str, object]:
    return {name: without_prose(schema.json_schema(name)) for name in schema.NAMES}


def without_prose(value: object) -> object:
    if isinstance(value, list | tuple):
        return [without_prose(item) for item in value]
    if not isinstance(value, dict):
        return value
    is_text = {key for key in ("title", "description") if isinstance(value.get(key), str)}
    return {key: without_prose(inner) for key, inner in value.items() if key not in is_text}


def test_every_document_is_asked_for_here() -> None:
    assert DOCUMENTS.keys() == {*schema.NAMES}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "command"), [*DOCUMENTS.items(), *MORE_DOCUMENTS])
def test_every_document_is_as_its_schema_says(
    name: str, command: str, root: Path, run: Run
) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    shutil.copytree(root, damaged := f"{root}-damaged")
    for index in Path(damaged).glob("s1/a1-*/index.json"):
        index.write_text("{")
    run("export", "--format", "hf", root / "s1", f"{root}-hf")
    with dc.Checkpointer(f"{root}-job", save=dc.every(steps=1), background=False) as job:
        job.restore({"w": torch.ones(1)})
        _, told, errors = run(*shlex.split(command.format(root=root)), "--json")
    assert not errors or "there was no answer" in errors
    assert name != "watch" or told.count("\n") == 1
    document = json.loads(told, parse_constant=lambda text: pytest.fail(f"{text} is no JSON"))
    _, shown, _ = run("schema", name)
    schema = json.loads(shown)
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    validator.validate(document)
    assert not validator.is_valid({**document, "more": 1})


def test_without_a_name_schema_lists_the_documents_once(run: Run) -> None:
    code, _, told = run("schema")
    assert (code, told.count("show-all")) == (2, 1)


def test_every_command_with_json_has_a_schema() -> None:
    options = {
        name: {one for param in command.params for one in param.opts}
        for name, command in commands().items()
    }
    assert {name for name, given in options.items() if "--json" in given} == {*schema.NAMES} - {
        "show-all",
        "verify-all",
        "dry-run",
    }


def test_exit_codes_follow_what_was_found(root: Path, run: Run) -> None:
    assert run("stats", f"{root}@1")[0] == 0
    assert run("stats", f"{root}@2")[0] == output.PROBLEM_FOUND
    assert run("stats", f"{root}@2", "--exclude", "model.w")[0] == 0
    assert run("diff", f"{root}@1", f"{root}@1", "--values")[0] == 0
    assert run("diff", f"{root}@1", f"{root}@2")[0] == output.PROBLEM_FOUND
    assert run("tensors", f"{root}@1", "-g", "nothing")[0] == output.USAGE
    assert run("diff", f"{root}@1", f"{root}@1", "--rtol", 1)[0] == output.USAGE


@pytest.mark.parametrize(
    "command",
    [
        *("rm {}", "strip {} optim", "gc {}/.. --grace 0", "cp {} {}-x", "pin {}", "tag {} x"),
        "prune {}/.. --keep last(1)",
    ],
)
def test_a_dry_run_changes_nothing(command: str, root: Path, run: Run) -> None:
    dead = root / "s9" / "a1-0123456789abcdef"
    dead.mkdir(parents=True)
    (dead / "claim.json").write_text("{}")
    before = {str(one): one.stat().st_mtime_ns for one in root.rglob("*")}
    given = command.format(*[root / "s1"] * 2).split()
    code, told, errors = run(*given, "--dry-run")
    assert (code, errors) == (0, "")
    assert "would be" in told
    assert {str(one): one.stat().st_mtime_ns for one in root.rglob("*")} == before
    if given[0] == "gc":
        assert "a1-0123456789abcdef" in told
        assert "1 would be removed" in told


def test_a_log_gets_a_line_every_few_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    with output.progress("work") as update:
        for second in range(100):
            now[0] = float(second)
            update(second, 100)
        early = capsys.readouterr().err.splitlines()
        for second in range(100, 86400, 10):
            now[0] = float(second)
            update(99, 100)
    assert len(early) == 19
    assert early[0] == "work: 5 B of 100 B, 95 s left"
    assert 100 < len(capsys.readouterr().err.splitlines()) < 300


# Runs commands, of which JSON has the words, and prints the exit code of each.
ONE_BY_ONE = """
import json
for words in json.loads(sys.argv[1]):
    try:
        main(words)
    except SystemExit as done:
        print(done.code)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_who_may_not_read_gets_one_line() -> None:
    # Not in tmp_path, where only its owner comes.
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        dc.save({"w": torch.ones(2)}, f"{folder}/s1")
        os.chmod(f"{folder}/s1", 0o700)
        names = ["show", "tensors", "stats", "verify", "cp", "ls"]
        done = as_another_user([words(name, f"{folder}/s1", f"{folder}/new") for name in names])
    assert done.stdout == f"{output.IO_ERROR}\n" * len(names), done.stderr
    assert [line[:11] for line in done.stderr.splitlines()] == ["dist-ckpt: "] * len(names)


def as_another_user(given: list[list[str]]) -> subprocess.CompletedProcess[str]:
    """Run commands one after the other, and print the exit code of each."""
    # The libraries may lie where that user does not come: they are imported before.
    imports = "import click, os, sys, numpy; from dist_ckpt.cli import cli, main"
    commands = "c = click.Context(cli); [cli.get_command(c, name) for name in cli.list_commands(c)]"
    code = f"{imports}; {commands}; os.setuid(65534)\n{ONE_BY_ONE}"
    return subprocess.run(
        [sys.executable, "-c", code, json.dumps(given)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_tensors_shows_the_pieces_of_a_fused_tensor(run: Run, tmp_path: Path) -> None:
    config = dc.ShardingConfig({"tp": 1}, {"qkv": {"tp": 0, "pieces": [8, 4, 4]}})
    dc.save({"model": {"qkv": torch.ones(16)}}, tmp_path / "ck", sharding=config)
    _, out, _ = run("tensors", tmp_path / "ck")
    assert "pieces [8, 4, 4] along dimension 0" in out
    (row,) = json.loads(run("tensors", tmp_path / "ck", "--json")[1])["tensors"]
    assert (row["pieces"], row["fused_dim"]) == ([8, 4, 4], 0)
