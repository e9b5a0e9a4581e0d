"""The command line as a whole: help, errors, streams; some commands as real processes."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys

import pytest
import torch

import dist_ckpt as dc
from long_mode import sampled_params


@pytest.mark.parametrize("command", ["ls", "show", "tree", "verify", "rm", "gc"])
@pytest.mark.parametrize(("path", "fact"), [("", "pass the path"), ("\udcff", "not valid UTF-8")])
def test_what_is_no_path_is_a_usage_error(run, command, path, fact):
    code, _, err = run(command, path)
    assert code == 2
    assert fact in err


WITHOUT_TORCH = """
import sys
class NoTorch:
    def find_spec(self, name, *_):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name="torch")
sys.meta_path.insert(0, NoTorch())
from dist_ckpt.cli import main
main()
"""


@pytest.mark.parametrize(
    "words",
    [
        "average {} {} --to {}-x",
        "export --format dcp {} {}-x",
        "export --format torch {} {}-x",
        "export --format hf --dtype bf16 {} {}-x",
    ],
)
def test_without_torch_it_says_what_to_install(checkpoint, words):
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *words.replace("{}", str(checkpoint)).split()],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert 'pip install "dist-ckpt[torch]"' in done.stderr


def test_a_wrong_option_is_a_usage_error(run, checkpoint):
    assert run("show", checkpoint, "--nonsense")[0] == 2
    assert run("nonsense")[0] == 2


def test_every_command_teaches_with_help(run):
    for command in ("ls", "show", "tree", "verify", "reshard", "rm", "gc", "prune", "pin", "tag"):
        code, out, _ = run(command, "--help")
        assert code == 0
        assert len(out.splitlines()) > 5


@pytest.mark.parametrize(
    "words",
    sampled_params(
        ["tree {} --json", "tree {}", "show {}", "verify {}", "ls {}", "show --help", "--help"], 3
    ),
)
def test_a_reader_that_goes_away_ends_it_quietly_and_well(checkpoint, words):
    command = f"{sys.executable} -m dist_ckpt {words.format(checkpoint)}"
    script = f"set -o pipefail; {command} | (exec <&-; sleep 0.1)"  # nobody reads
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command} | head -n 1"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) == 1


@pytest.mark.multi_process
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("words", "redirected", "code", "told"),
    [
        ("ls {path}", ">&-", 0, ""),
        ("ls {path}", "<&- >&- 2>&-", 0, ""),
        ("rm {path}", "<&-", 6, "is not deleted: add --yes"),
        ("verify {path}", "2>&- >/dev/null", 0, ""),
        ("verify {path}-not-there", "2>&- >/dev/null", 3, ""),
        ("ls {path}", ">/dev/full", 5, "(ENOSPC): free space"),
        ("verify {path} --json", ">/dev/full", 5, "(ENOSPC): free space"),
        ("--help", ">/dev/full", 5, "(ENOSPC): free space"),
    ],
)
def test_streams_that_are_closed_or_full_are_no_traceback(
    words, redirected, code, told, checkpoint
):
    command = f"exec {sys.executable} -m dist_ckpt {words.format(path=checkpoint)} {redirected}"
    # Python keeps what it prints until it ends, unless whoever started the tests wants it at once.
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        ["sh", "-c", command], env=environ, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr
    assert told in done.stderr
    assert "Exception ignored" not in done.stderr


@pytest.mark.multi_process
def test_an_interrupt_while_it_starts_is_no_traceback(tmp_path):
    (tmp_path / "click.py").write_text("raise KeyboardInterrupt")
    done = subprocess.run(
        [sys.executable, "-m", "dist_ckpt", "ls"],
        check=False,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


@pytest.mark.parametrize(
    ("files", "told"),
    [
        (["model.safetensors", "config.json"], "`dist-ckpt import --from hf`"),
        (["model.safetensors.index.json"], "`dist-ckpt import --from hf`"),
        (["other.safetensors"], "`dist-ckpt import --from hf`"),
        (["claim.json", "0-0.safetensors"], "Pass the folder that was given to save"),
        (["__0_0.distcp"], "but .metadata is missing, which a save writes last"),
    ],
)
def test_files_of_others_are_told_what_they_are_and_what_to_do(run, tmp_path, files, told):
    for file in files:
        (tmp_path / file).write_text("")
    code, _, errors = run("rm", tmp_path, "--yes")
    assert (code, told in errors) == (3, True), errors
    assert sorted(one.name for one in tmp_path.iterdir()) == sorted(files)


def test_reading_commands_never_import_torch(checkpoint):
    code = (
        "import sys\nfrom dist_ckpt import cli\n"
        "for command in ('ls', 'show', 'tree', 'verify'):\n"
        "    try:\n        cli.main([command, sys.argv[1]])\n"
        "    except SystemExit as exit_:\n        assert exit_.code == 0, command\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(checkpoint)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_old_name_of_a_command_is_refused_with_the_new_one(run):
    code, out, errors = run("plan", "--from", "runs/a@latest")
    assert (code, out) == (2, "")
    assert "dist-ckpt plan is called dist-ckpt estimate since 0.2.0" in errors


@pytest.mark.parametrize(
    "words",
    [
        *("show {}", "tree {}", "verify {}", "ls {}", "pin {}", "rm {} --yes", "report {} --json"),
        *("gc {} --dry-run --json", "stats {} --json", "layout {} --json", "estimate --from {}"),
    ],
)
def test_every_command_takes_a_selector(run, root, words):
    code, out, _ = run(*words.format(f"{root}@latest").split())
    assert code == 0
    assert "s4" in out
    code, _, err = run(*words.format(f"{root}@newest").split())
    assert code == 2
    assert "'newest' is not a selector: there are @latest" in err
    code, _, err = run(*words.format(f"{root}@99").split())
    assert code == 3
    assert "no checkpoint of step 99" in err


@pytest.mark.parametrize(
    "words", [("rm", "{}/s1"), ("strip", "{}/s1", "optim"), ("prune", "{}", "--keep", "last(1)")]
)
def test_a_question_is_no_part_of_what_is_printed(run, root, words, monkeypatch):
    for step in (1, 2):
        state = {"model": {"w": torch.ones(1)}, "optim": {"m": torch.ones(1)}}
        dc.save(state, root / f"s{step}", step=step, overwrite=True)
    given = [word.format(root) for word in words]
    for answer, code in (("n", 6), ("y", 0)):
        terminal = io.StringIO(f"{answer}\n")
        monkeypatch.setattr(terminal, "isatty", lambda: True)
        monkeypatch.setattr("sys.stdin", terminal)
        found, out, err = run(*given, "--json")
        assert (found, "[y/N]" in err) == (code, True)
        assert bool(out.strip()) == (answer == "y")  # click may print a space
    assert json.loads(out)["schema"] == f"dist-ckpt.{words[0]}/2"
