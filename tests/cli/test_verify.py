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


def test_one_problem_is_one(run, checkpoint):
    (file,) = Path(checkpoint).glob("*/model-00000.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    code, out, _ = run("verify", str(checkpoint))
    assert code == 1
    assert "1 problem; load an older one" in out
