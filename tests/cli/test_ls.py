"""`dist-ckpt ls`."""

from __future__ import annotations

import json
import os

import pytest

import dist_ckpt as dc
from commands import open_attempt, steps
from dist_ckpt.core.storage.local.local_storage import LocalStorage
from dist_ckpt.errors import ConflictError, StorageError
from dist_ckpt.message_text import format_size


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
    assert f"{tmp_path}/gone does not exist: check its spelling, or list {tmp_path}" in err
    (tmp_path / "file").touch()
    for words in (("ls",), ("gc",)):
        assert "is not a folder: give the folder of a run" in run(*words, tmp_path / "file")[2]
    assert "gone does not exist" in run("gc", tmp_path / "gone")[2]
    assert "Traceback" not in err


def test_of_many_metrics_a_table_has_the_first_few(run, root):
    dc.Run(root).metrics(1, {f"eval/m{number}": number for number in range(12)})
    out = run("ls", root)[1]
    assert "val/loss=1, eval/m0=0, eval/m1=1, eval/m2=2, 9 more" in out
    assert run("ls", root, "--json")[1].count("eval/m") == 12


def test_the_speed_of_an_evaluation_does_not_fill_the_table(run, root):
    names = ("runtime", "samples_per_second", "steps_per_second", "jit_compilation_time")
    timings = {f"eval_{name}": 1.0 for name in names}
    dc.Run(root).metrics(4, {**timings, "train_runtime": 1.0, "eval_runtime_error": 2.0})
    for words in (("ls", root), ("compare", root), ("watch", root, "--once")):
        assert "val/loss=4, eval_runtime_error=2, 5 more" in run(*words)[1], words
    facts = json.loads(run("report", root, "--json", "--verify", "none")[1])
    assert [row["name"] for row in facts["metrics"]][:2] == ["eval_runtime_error", "val/loss"]


def test_ls_ends_with_a_total(run, root):
    nbytes = sum(info.nbytes or 0 for info in dc.checkpoints(root))
    assert run("ls", root)[1].splitlines()[-1] == f"4 checkpoints, {format_size(nbytes)}"


def test_a_name_cannot_look_like_a_line_of_ours(run, root):
    dc.Run(root).metrics(1, {"x\nstep-00000009  9  committed": 1.0})
    assert len(run("ls", root)[1].splitlines()) == 6
    assert len(run("watch", root, "--once")[1].splitlines()) == 7


def test_a_link_to_a_checkpoint_stands_for_it(run, root, tmp_path):
    for name in ("first", "second"):
        (tmp_path / name).symlink_to(root / "s1", target_is_directory=True)
    assert run("pin", tmp_path / "first")[0] == 0
    assert dc.checkpoints(root)[0].is_pinned
    assert not (tmp_path / ".annotations").exists()
    code, _, err = run("rm", tmp_path / "second", "--yes")
    assert code == 5
    assert "is protected: pinned" in err
    with pytest.raises(ConflictError, match="is protected: pinned"):
        dc.delete(tmp_path / "second")
    assert steps(root) == [1, 2, 3, 4]


def test_nan_is_text_in_json(run, root):
    dc.Run(root).metrics(4, {"val/loss": float("nan")})
    document = json.loads(run("ls", root, "--json")[1], parse_constant=pytest.fail)
    assert document["checkpoints"][-1]["metrics"] == {"val/loss": "nan"}


def test_runs_are_named_though_one_of_them_cannot_be_looked_into(run, root, monkeypatch):
    (root.parent / "other" / "broken").mkdir(parents=True)
    listed = LocalStorage.list

    def fail(self, folder, **options):
        if folder.endswith("/broken"):
            raise StorageError("the disk")
        return listed(self, folder, **options)

    monkeypatch.setattr(LocalStorage, "list", fail)
    assert f"but in {root}: list one" in run("ls", root.parent)[1]


def test_runs_in_a_folder_of_them_are_named_whatever_lies_beside(run, root, tmp_path):
    dc.save({"x": 1}, tmp_path / "single" / "s1")
    os.mkdir(os.fsencode(tmp_path) + b"/\xff")
    for number in range(60):
        (tmp_path / f"a{number:02}").mkdir()
    told = f"{tmp_path}/run, {tmp_path}/single"
    assert (
        run("ls", tmp_path)[1] == f"no checkpoints in {tmp_path}, but in {told}: list one of them\n"
    )
    document = json.loads(run("ls", tmp_path, "--json")[1])
    assert (document["checkpoints"], document["runs"]) == ([], told.split(", "))
    dc.save({"x": 1}, tmp_path / "beside", step=1)
    out = run("ls", tmp_path)[1]
    assert "beside" in out
    assert f"there are more in {told}: list one of them" in out


def test_recorded_damage_is_listed_with_its_file(run, root):
    for path in root.glob("s4/a*/objects.msgpack"):
        path.unlink()
    assert "checked" not in run("ls", root)[1]
    run("verify", root)
    code, out, _ = run("ls", root)
    row = next(line for line in out.splitlines() if line.startswith("s4 "))
    assert (code, "damaged" in row, "checked" in row) == (0, True, False)
    assert out.count("checked") == 3
    assert "objects.msgpack is missing" in out
    rows = json.loads(run("ls", root, "--json")[1])["checkpoints"]
    assert [row["damage"] is None for row in rows] == [True, True, True, False]
