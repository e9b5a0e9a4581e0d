"""The command line, run as a user runs it; a few commands also as real processes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import dist_ckpt as dc
from dist_ckpt.cli.commands.gc import exclusive_gc

pytest.importorskip("torch")

import torch
from safetensors.torch import save_file


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "run" / "step-00000007"
    state = {
        "model": {"w": torch.arange(12.0).reshape(3, 4), "b": torch.ones(4)},
        "step": 7,
        "loader": dc.PerRank({"position": 3}),
    }
    dc.save(state, path, step=7, metadata={"loss": 2.5, "note": "first"})
    return path


def damage(path: Path) -> Path:
    """Flip a bit in the last byte of the model's shard file."""
    (file,) = path.glob("a1-*/model-00000.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    return file


def open_attempt(path: Path) -> None:
    """Leave what a save leaves that died after its claim."""
    folder = path / "a1-0123456789abcdef"
    folder.mkdir(parents=True)
    (folder / "claim.json").write_text("{}")


def test_ls_lists_a_run_with_steps_and_states(run, checkpoint):
    open_attempt(checkpoint.parent / "step-00000008")
    code, out, _ = run("ls", checkpoint.parent)
    assert code == 0
    lines = out.splitlines()
    assert lines[0].split() == ["NAME", "STEP", "STATE", "SIZE", "RANKS", "TENSORS", "AGE"]
    assert lines[1].split()[:3] == ["step-00000008", "-", "open"]
    assert lines[2].split()[:3] == ["step-00000007", "7", "committed"]


def test_ls_as_json_has_a_schema_and_the_metadata(run, checkpoint):
    code, out, _ = run("ls", checkpoint.parent, "--json")
    document = json.loads(out)
    assert code == 0
    assert document["schema"] == "dist-ckpt.ls/2"
    (one,) = document["checkpoints"]
    assert (one["step"], one["state"], one["world_size"]) == (7, "committed", 1)
    assert one["metadata"] == {"loss": 2.5, "note": "first"}


def test_ls_of_an_empty_folder_says_so(run, tmp_path):
    assert run("ls", tmp_path) == (0, f"no checkpoints in {tmp_path}\n", "")


def test_of_a_folder_of_runs_they_are_named(run, checkpoint):
    runs = checkpoint.parent.parent
    (runs / "other").mkdir()
    told = f"no checkpoints in {runs}, but in {checkpoint.parent}: list one of them\n"
    assert run("ls", runs) == (0, told, "")
    assert json.loads(run("ls", runs, "--json")[1])["checkpoints"] == []


def test_ls_of_no_folder_exits_with_not_found(run, tmp_path):
    code, _, err = run("ls", tmp_path / "gone")
    assert code == 3
    assert "gone" in err
    assert "Traceback" not in err


def test_show_tells_what_a_checkpoint_is(run, checkpoint):
    code, out, _ = run("show", checkpoint)
    assert code == 0
    facts = ("step        7", "for 1 ranks", "2, and 0 tied names", "loader: 1 keys", "loss = 2.5")
    assert [fact for fact in facts if fact not in out] == []


def test_show_tells_no_time_at_which_files_of_others_were_committed(run, tmp_path):
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    code, told, _ = run("show", tmp_path)
    assert (code, "1970" in told, "committed" in told) == (0, False, False)


def test_show_as_json_counts_bytes_by_component_and_dtype(run, checkpoint):
    _, out, _ = run("show", checkpoint, "--json")
    document = json.loads(out)
    assert document["schema"] == "dist-ckpt.show/2"
    assert document["nbytes_by_component"] == {"model": 64}
    assert document["nbytes_by_dtype"] == {"float32": 64}
    assert document["per_rank"] == {"loader": 1}


def test_show_of_an_uncommitted_checkpoint_exits_with_not_found(run, tmp_path):
    open_attempt(tmp_path / "ck")
    code, _, err = run("show", tmp_path / "ck")
    assert code == 3
    assert "ck" in err


def test_tree_shows_names_shapes_and_sizes(run, checkpoint):
    code, out, _ = run("tree", checkpoint)
    assert code == 0
    assert "float32 [3, 4]" in out
    _, out, _ = run("tree", checkpoint, "--depth", 1)
    assert "float32" not in out
    assert "model" in out


def test_tree_as_json(run, checkpoint):
    _, out, _ = run("tree", checkpoint, "--json")
    document = json.loads(out)
    assert document["schema"] == "dist-ckpt.tree/2"
    assert {"name": "model.b", "nbytes": 16, "tensor": "float32 [4]"} in document["nodes"]


def test_a_terminal_cannot_be_steered_by_a_name(run, tmp_path):
    dc.save({"evil\x1b[2J": torch.ones(1)}, tmp_path / "ck")
    _, out, _ = run("tree", tmp_path / "ck")
    assert "\x1b" not in out
    assert "evil\\x1b[2J" in out


def test_verify_of_a_sound_checkpoint_is_fine(run, checkpoint):
    code, out, _ = run("verify", checkpoint)
    assert code == 0
    assert out.endswith("ok\n")


def test_verify_names_what_is_damaged_and_exits_with_a_finding(run, checkpoint):
    file = damage(checkpoint)
    code, out, _ = run("verify", checkpoint)
    assert code == 1
    assert "model.w" in out
    assert file.name in out
    code, out, _ = run("verify", checkpoint, "--json")
    document = json.loads(out)
    assert (code, document["ok"]) == (1, False)
    assert document["problems"][0]["tensor"] == "model.w"
    assert document["problems"][0]["rank"] == 0


def test_verify_of_a_runs_folder_verifies_all_in_it(run, checkpoint):
    root = checkpoint.parent
    dc.save({"model": {"w": torch.ones(4)}}, root / "step-00000008", step=8)
    open_attempt(root / "step-00000009")
    (root / "logs").mkdir()
    code, out, _ = run("verify", root)
    assert code == 0
    assert [line.partition(": ")[0] for line in out.splitlines()] == [
        f"note     {root / 'step-00000009'}",
        str(checkpoint),
        str(root / "step-00000008"),
        str(root),
    ]
    assert "not committed (open): not checked" in out
    assert out.endswith("2 checkpoints checked, 0 damaged\n")
    file = damage(checkpoint)
    code, out, _ = run("verify", root)
    assert code == 1
    assert file.name in out
    assert out.endswith("2 checkpoints checked, 1 damaged\n")
    code, out, _ = run("verify", root, "--json")
    document = json.loads(out)
    assert (code, document["schema"], document["ok"]) == (1, "dist-ckpt.verify-all/2", False)
    assert [one["ok"] for one in document["checkpoints"]] == [False, True]
    assert document["not_checked"] == [
        {"path": str(root / "step-00000009"), "why": "not committed (open)"}
    ]


def test_verify_of_a_runs_folder_goes_on_after_one_that_cannot_be_read(run, checkpoint):
    other = checkpoint.parent / "step-00000008"
    dc.save({"model": {"w": torch.ones(4)}}, other, step=8)
    (index,) = checkpoint.glob("a1-*/index.json")
    newer = '{"format":{"version":2},"digest":"00"}'
    for content, code, told in (
        ("torn", 1, "DAMAGED  "),
        (newer, 4, f"note     {checkpoint}: "),
    ):
        index.write_text(content)
        found, out, _ = run("verify", checkpoint.parent)
        assert found == code
        assert out.startswith(told)
        assert re.search(rf"^{other}: [0-9]+ files, .* checked: ok$", out, re.M)


def test_verify_of_a_folder_with_no_checkpoint_finds_none(run, tmp_path):
    open_attempt(tmp_path / "run" / "step-1")
    code, _, err = run("verify", tmp_path / "run")
    assert code == 3
    assert "no committed checkpoint is in" in err
    assert run("verify", tmp_path)[0] == 3


def test_a_quick_verify_reads_no_tensor(run, checkpoint):
    damage(checkpoint)
    assert run("verify", checkpoint, "--quick")[0] == 0


def test_reshard_writes_what_was_stored_for_other_ranks(run, checkpoint, tmp_path):
    code, out, _ = run("reshard", checkpoint, tmp_path / "wide", "--world-size", 3)
    assert code == 0
    assert "2 tensors" in out
    with dc.open(checkpoint) as old, dc.open(tmp_path / "wide") as new:
        assert new.world_size == 3
        assert all(old[fqn][...] == new[fqn][...] for fqn in old.tensors)
        assert new.objects == old.objects
        assert new.per_rank == old.per_rank
        assert new.metadata == old.metadata


def test_reshard_overwrites_if_it_is_told_to(run, checkpoint, tmp_path):
    run("reshard", checkpoint, tmp_path / "wide", "--world-size", 3)
    arguments = ("reshard", checkpoint, tmp_path / "wide", "--world-size", 2)
    code, _, err = run(*arguments)
    assert code == 5
    assert "overwrite=True" in err
    assert run(*arguments, "--overwrite")[0] == 0
    assert dc.verify(tmp_path / "wide").ok
    assert dc.open(tmp_path / "wide").world_size == 2
    assert [entry.name[:3] for entry in (tmp_path / "wide").iterdir()] == ["a2-"]


def test_reshard_takes_a_sharding_from_a_file(run, checkpoint, tmp_path):
    file = tmp_path / "tp.toml"
    file.write_text('[mesh]\ntp = 2\n[rules."w"]\ntp = 1\n')
    code, _, _ = run("reshard", checkpoint, tmp_path / "tp", "--sharding", file)
    assert code == 0
    names = sorted(f.name for f in (tmp_path / "tp").glob("a1-*/*.safetensors"))
    assert names == ["model-00000.safetensors", "model-00001.safetensors"]


@pytest.mark.parametrize(
    "arguments",
    [(), ("--world-size", "2", "--sharding", "x.toml"), ("--world-size", "0")],
)
def test_reshard_with_an_unclear_target_is_a_usage_error(run, checkpoint, tmp_path, arguments):
    assert run("reshard", checkpoint, tmp_path / "new", *arguments)[0] == 2
    assert not (tmp_path / "new").exists()


def test_reshard_by_a_file_that_is_not_there_names_it(run, checkpoint, tmp_path):
    code, _, err = run("reshard", checkpoint, tmp_path / "new", "--sharding", "missing.toml")
    assert code == 2
    assert "missing.toml cannot be read" in err
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("command", ["ls", "show", "tree", "verify", "rm", "gc"])
@pytest.mark.parametrize(("path", "fact"), [("", "pass the path"), ("\udcff", "not valid UTF-8")])
def test_what_is_no_path_is_a_usage_error(run, command, path, fact):
    code, _, err = run(command, path)
    assert code == 2
    assert fact in err


def test_reshard_onto_something_is_refused_and_changes_nothing(run, checkpoint, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("keep")
    code, _, err = run("reshard", checkpoint, tmp_path / "mine", "--world-size", 2)
    assert code == 5
    assert "mine" in err
    assert [f.name for f in (tmp_path / "mine").iterdir()] == ["file"]


def test_rm_without_yes_is_refused(run, checkpoint):
    code, _, err = run("rm", checkpoint)
    assert code == 6
    assert "--yes" in err
    assert dc.open(checkpoint).step == 7


def test_rm_deletes_the_checkpoint_even_a_damaged_one(run, checkpoint):
    damage(checkpoint)
    assert run("rm", checkpoint, "--yes")[0] == 0
    assert not checkpoint.exists()
    assert run("rm", checkpoint, "--yes")[0] == 3


def test_rm_of_a_folder_that_is_no_checkpoint_touches_nothing(run, tmp_path):
    (tmp_path / "file").write_text("keep")
    assert run("rm", tmp_path, "--yes")[0] == 3
    assert (tmp_path / "file").read_text() == "keep"


def test_gc_finishes_a_delete_that_died_half_way(run, tmp_path):
    trash = tmp_path / "run" / "step-1" / ".trash-a1-0123456789abcdef"
    trash.mkdir(parents=True)
    (trash / "objects.msgpack").write_bytes(b"x")
    code, out, _ = run("gc", tmp_path / "run")
    assert code == 0
    assert "1 removed" in out
    assert not trash.exists()


def test_gc_removes_what_a_dead_save_left_and_nothing_else(run, checkpoint):
    dead = checkpoint.parent / "step-00000008"
    open_attempt(dead)
    assert "0 removed" in run("gc", checkpoint.parent)[1]
    code, out, _ = run("gc", checkpoint.parent, "--grace", "0")
    assert code == 0
    assert "1 removed" in out
    assert not list(dead.glob("a1-*"))
    assert dc.open(checkpoint).step == 7


def test_one_collector_of_a_run_at_a_time(run, checkpoint, tmp_path, monkeypatch):
    (tmp_path / "temp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temp"))
    with exclusive_gc(str(checkpoint.parent)):
        code, _, err = run("gc", checkpoint.parent)
        assert code == 5
        assert "another dist-ckpt gc is running" in err
        assert run("gc", tmp_path / "temp")[0] == 0
    assert run("gc", checkpoint.parent)[0] == 0
    assert {path.name for path in checkpoint.parent.iterdir()} == {"step-00000007"}


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
    "words", ["tree {} --json", "tree {}", "show {}", "verify {}", "ls {}", "--help", "show --help"]
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
        (["other.safetensors"], "add model.safetensors.index.json"),
        (["__0_0.distcp"], "without the .metadata that its saves write last"),
    ],
)
def test_files_of_others_are_told_what_they_are_and_what_to_do(run, tmp_path, files, told):
    for file in files:
        (tmp_path / file).write_text("")
    code, _, errors = run("rm", tmp_path, "--yes")
    assert (code, told in errors) == (3, True), errors
    assert sorted(one.name for one in tmp_path.iterdir()) == sorted(files)


def test_show_names_the_values_for_who_chooses_by_globs(run, tmp_path):
    dc.save({"w": torch.ones(1), "epoch": 3, "scheduler": {"n": [1]}}, tmp_path / "ck")
    assert "values      2: epoch, scheduler\n" in run("show", tmp_path / "ck")[1]


@pytest.mark.parametrize(
    "words",
    [
        *("verify {}", "verify {} --json", "verify {}/..", "verify {}/.. --json"),
        "report {} --verify full -o {}.html",
    ],
)
def test_damage_is_told_by_the_exit_code_though_nobody_reads_on(checkpoint, words):
    (file,) = Path(checkpoint).glob("*/model-00000.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    command = f"{sys.executable} -m dist_ckpt {words.replace('{}', str(checkpoint))}"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command} | (exec <&-; sleep 0.1)"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (1, "")


def test_one_problem_is_one(run, checkpoint):
    (file,) = Path(checkpoint).glob("*/model-00000.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    code, out, _ = run("verify", str(checkpoint))
    assert code == 1
    assert "1 problem; load an older one" in out


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
