"""`dist-ckpt import`, of what DCP, torch.save and Hugging Face wrote: what it makes and says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import dist_ckpt as dc

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

Run = Callable[..., tuple[int, str, str]]


def weights() -> dict[str, torch.Tensor]:
    return {"w": torch.arange(12.0).reshape(4, 3), "b": torch.ones(4)}


@pytest.fixture
def sources(tmp_path: Path) -> dict[str, Path]:
    """The same weights, as each system writes them."""
    dcp.save({"model": weights()}, checkpoint_id=tmp_path / "dcp")
    torch.save(weights(), tmp_path / "a.pt")  # noqa: TID251 - it is what users have
    (tmp_path / "hf").mkdir()
    save_file(weights(), tmp_path / "hf" / "model.safetensors")
    return {"dcp": tmp_path / "dcp", "torch": tmp_path / "a.pt", "hf": tmp_path / "hf"}


KINDS = ["dcp", "torch", "hf"]


@pytest.mark.parametrize("kind", KINDS)
def test_one_command_makes_a_checkpoint(
    sources: dict[str, Path], tmp_path: Path, kind: str, run: Run
) -> None:
    target = tmp_path / "ours"
    code, told, errors = run("import", "--from", kind, sources[kind], target, "--ranks", 2)
    assert (code, errors) == (0, "")
    assert told.startswith(f"{target}: 2 tensors, ")
    assert told.endswith(" in 3 files\n")
    state: dict[str, Any] = {"model": {"w": torch.zeros(4, 3), "b": torch.zeros(4)}}
    dc.load(state, target)
    assert all(torch.equal(state["model"][name], value) for name, value in weights().items())
    with dc.open(target) as found:
        assert found.world_size == 2
    code, told, errors = run("import", sources[kind], tmp_path / "auto", "--ranks", 2)
    assert (code, errors) == (0, f"{sources[kind]}: the format is {kind}\n")
    assert told.startswith(f"{tmp_path / 'auto'}: 2 tensors, ")
    code, _, errors = run("import", "--from", kind, sources[kind], target)
    assert code == 5
    assert "overwrite=True" in errors
    assert run("import", "--from", kind, sources[kind], target, "--overwrite", "--step", 7)[0] == 0
    with dc.open(target) as found:
        assert (found.world_size, found.step) == (1, 7)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
def test_patterns_that_leave_nothing_are_refused(
    sources: dict[str, Path], tmp_path: Path, kind: str, dry: list[str], run: Run
) -> None:
    for patterns in (["--exclude", "model"], ["--exclude", "*.w", "--exclude", "*.b"]):
        words = ["import", "--from", kind, sources[kind], tmp_path / "ours", *patterns, *dry]
        code, _, errors = run(*words)
        assert (code, "leaves nothing" in errors) == (2, True), errors
    assert not (tmp_path / "ours").exists()


def test_what_is_left_of_a_file_may_be_values_alone(tmp_path: Path, run: Run) -> None:
    torch.save({"model": weights(), "epoch": 3}, tmp_path / "a.pt")  # noqa: TID251
    words = ["import", "--from", "torch", tmp_path / "a.pt", tmp_path / "ours"]
    assert run(*words, "--exclude", "model")[0] == 0
    with dc.open(tmp_path / "ours") as found:
        assert dict(found.objects) == {"epoch": 3}


def test_tensors_without_a_checksum_are_counted(tmp_path: Path, run: Run) -> None:
    with torch.serialization.skip_data():
        torch.save(weights(), tmp_path / "a.pt")  # noqa: TID251
    words = ["import", "--from", "torch", tmp_path / "a.pt"]
    assert "2 tensors without a checksum to check" in run(*words, tmp_path / "ours")[1]
    _, text, _ = run(*words, tmp_path / "other", "--json")
    assert json.loads(text)["num_unchecked"] == 2


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_there_or_something_else_is_one_line(
    sources: dict[str, Path], tmp_path: Path, kind: str, run: Run
) -> None:
    code, _, errors = run("import", "--from", kind, tmp_path / "nothing", tmp_path / "ours")
    assert code == 3
    assert errors.startswith(f"dist-ckpt: {tmp_path}/nothing")
    assert errors.count("\n") == 1
    for other, path in sources.items():
        if other != kind:
            code, _, errors = run("import", "--from", kind, path, tmp_path / "ours")
            assert code in (1, 3, 4, 5), errors
            assert errors.startswith(f"dist-ckpt: {path}")
            assert errors.count("\n") == 1
    assert not (tmp_path / "ours").exists()


def test_ranks_are_a_number_and_no_option_of_shrew(tmp_path: Path, run: Run) -> None:
    assert run("import", "--from", "dcp", tmp_path, tmp_path / "ours", "--ranks", 0)[0] == 2
    assert run("import", "--from", "dcp", tmp_path, tmp_path / "ours", "--step", -1)[0] == 2
    code, _, errors = run("import", "--from", "shrew", tmp_path, tmp_path / "ours", "--ranks", 2)
    assert code == 2
    assert run("import", "--from", "shrew", tmp_path, tmp_path / "ours", "--step", 2)[0] == 2
    assert "Reshard the checkpoint if needed" in errors


def test_the_help_has_an_example(run: Run) -> None:
    code, told, _ = run("import", "--help")
    assert code == 0
    assert (
        "dist-ckpt import --from dcp old/step-500 runs/a/step-00000500 --step 500 --ranks 8" in told
    )


@pytest.mark.parametrize("kind", KINDS)
def test_globs_choose_what_is_imported(
    sources: dict[str, Path], tmp_path: Path, kind: str, run: Run
) -> None:
    first, _ = weights()
    words = ["import", "--from", kind, sources[kind], tmp_path / "ours"]
    assert run(*words, "-g", f"model.{first}")[0] == 0
    with dc.open(tmp_path / "ours") as found:
        assert [*found] == [f"model.{first}"]
    code, _, errors = run(*words, "--overwrite", "-g", "nothing")
    assert code
    assert "'nothing' matches no name" in errors


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_imported_goes_out_again_for_torch(
    sources: dict[str, Path], tmp_path: Path, kind: str, run: Run
) -> None:
    ours, out = tmp_path / "ours", tmp_path / "out.pt"
    run("import", "--from", kind, sources[kind], ours)
    words = ("export", "--format", "torch", "--only", "model", ours, out)
    code, told, errors = run(*words, "--json")
    assert (code, errors) == (0, "")
    assert json.loads(told)["nbytes"] == out.stat().st_size
    loaded = torch.load(out, weights_only=True)  # noqa: TID251 - as a user does
    assert loaded.keys() == weights().keys()
    assert all(torch.equal(loaded[name], one) for name, one in weights().items())
    assert run(*words, "--overwrite")[0] == 0
    code, _, errors = run(*words)
    assert code
    assert "something is there already" in errors


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_imported_goes_out_again_for_dcp(
    sources: dict[str, Path], tmp_path: Path, kind: str, run: Run
) -> None:
    run("import", "--from", kind, sources[kind], tmp_path / "ours")
    code, told, errors = run("export", "--format", "dcp", tmp_path / "ours", tmp_path / "out")
    assert (code, errors) == (0, "")
    assert told.startswith(f"{tmp_path / 'out'}: ")
    loaded = {"model": {name: torch.zeros_like(one) for name, one in weights().items()}}
    dcp.load(loaded, checkpoint_id=tmp_path / "out")
    assert all(torch.equal(loaded["model"][name], one) for name, one in weights().items())
    again = ("export", "--format", "dcp", tmp_path / "ours", tmp_path / "out")
    code, _, errors = run(*again, "--overwrite")
    assert code == 2
    assert "remove the folder first" in errors
    code, _, errors = run(*again)
    assert code
    assert "something is there already" in errors
