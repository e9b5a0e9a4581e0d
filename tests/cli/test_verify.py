"""`dist-ckpt verify`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import dist_ckpt as dc
from commands import damage, open_attempt
from long_mode import sampled_params


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
    newest = root / "step-00000008"
    assert out.endswith(f"2 checkpoints checked, 1 damaged; the newest good one is {newest}\n")
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
    for content, code, told in (("torn", 1, "DAMAGED  "), (newer, 4, f"note     {checkpoint}: ")):
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


@pytest.mark.parametrize(
    "words",
    [
        *sampled_params(
            ["verify {}", "verify {}/.. --json", "verify {}/..", "verify {} --json"], 2
        ),
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


@pytest.fixture
def root(tmp_path):
    """Return a run of three steps, each with 30 tensors of a block or so."""
    root = tmp_path / "run"
    for step in (10, 20, 30):
        weights = {f"w{number:02}": torch.ones(30 + number) for number in range(30)}
        dc.save({"model": weights}, root / f"step-{step}", step=step)
    return root


def shard_file(root, step):
    return next((root / f"step-{step}").glob("a1-*/model-00000.safetensors"))


@pytest.mark.parametrize("quick", [[], ["--quick"]])
def test_a_truncated_file_is_one_problem_and_one_line_names_what_is_lost(run, root, quick):
    file = shard_file(root, 30)
    whole = file.read_bytes()
    tensors = ", ".join(f"model.w{number:02} rows 0:{30 + number}" for number in range(20))
    problem = f"{file} of rank 0 is truncated: {{}} of {len(whole):,} bytes"
    newest = f"1 problem; the newest good one is {root / 'step-20'}"
    for nbytes, lost in ((100, f"{tensors}, and 10 more"), (len(whole) - 1, "model.w29 rows 0:59")):
        file.write_bytes(whole[:nbytes])
        code, out, _ = run("verify", root / "step-30", *quick)
        first, second, last = out.splitlines()
        assert code == 1
        assert first == f"DAMAGED  {problem.format(f'{nbytes:,}')}"
        assert second == f"         lost with it: {lost}"
        assert last.endswith(newest)
    document = json.loads(run("verify", root / "step-30", "--json")[1])
    assert [row["tensor"] for row in document["problems"]] == [None, "model.w29"]
    facts = json.loads(run("report", root / "step-30", "--json")[1])
    assert facts["verification"]["problems"][1]["what"] == "lost with the file"


def test_damage_that_is_alike_is_one_line_with_a_count(run, root):
    file = shard_file(root, 30)
    data = bytearray(file.read_bytes())
    data[8192:] = bytes(len(data) - 8192)  # behind the header
    file.write_bytes(data)
    code, out, _ = run("verify", root / "step-30")
    first, second, last = out.splitlines()
    assert code == 1
    assert first.startswith("DAMAGED  model.w00 rows 0:30: damaged, the block's digest is ")
    assert second.startswith("         and 29 more like it: model.w01 rows 0:31, model.w02 rows")
    assert second.endswith(", and 9 more")
    assert last.endswith(f"30 problems; the newest good one is {root / 'step-20'}")


def test_a_step_whose_index_is_broken_is_named_and_so_is_the_newest_good_one(run, root):
    shard_file(root, 30).unlink()
    assert run("verify", root / "step-30")[0] == 1
    next((root / "step-20").glob("a1-*/index.json")).write_text("torn")
    newest = f"The newest good checkpoint is {root / 'step-10'}\n"
    for words in (("show", f"{root}@20"), ("show", root / "step-20"), ("pin", f"{root}@20")):
        code, out, err = run(*words)
        assert (code, out) == (1, ""), words
        assert "index.json: not JSON" in err
        assert err.endswith(newest), err
    code, _, err = run("show", f"{root}@21")
    assert code == 3
    assert err.endswith("the steps there are: 10, 30; not readable: step-20 is damaged\n")


def test_one_problem_is_one(run, checkpoint):
    (file,) = Path(checkpoint).glob("*/model-00000.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    code, out, _ = run("verify", str(checkpoint))
    assert code == 1
    assert "1 problem; load an older one" in out
