"""Which iteration of a Megatron run is imported: the tracker's, and what is said of others."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import dist_ckpt as dc
from dist_ckpt.errors import CorruptError, IncompatibleError, NotFoundError
from dist_ckpt.interop import imports

MADE = Path(__file__).parents[1] / "golden" / "foreign" / "megatron" / "made"


def run_of(root: Path, *iterations: int, complete: bool = True) -> Path:
    """Make the folder of a run whose iterations are copies of one that Megatron wrote."""
    for number in iterations:
        folder = root / f"iter_{number:07}"
        shutil.copytree(MADE, folder)
        common = torch.load(folder / "common.pt", weights_only=False)
        torch.save({**common, "iteration": number}, folder / "common.pt")
        if not complete:
            (folder / "metadata.json").unlink()  # Megatron writes it last
    return root


def track(root: Path, step: Any, name: str = "latest_train_state.pt") -> None:
    if name.endswith(".pt"):
        torch.save({"step": step, "consumed_train_samples": torch.tensor(64)}, root / name)
    else:
        (root / name).write_text(str(step))


def imported_step(root: Path, target: Path) -> int | None:
    imports.from_megatron(root, target)
    with dc.open(target) as found:
        return found.step


@pytest.mark.parametrize(
    "step", [torch.tensor(200, dtype=torch.int32), torch.tensor(200), torch.tensor([200]), 200]
)
def test_the_tracker_of_megatron_bridge_is_followed(tmp_path: Path, step: Any) -> None:
    run = run_of(tmp_path / "run", 100, 200)
    track(run, step)
    assert imported_step(run, tmp_path / "ours") == 200
    with pytest.raises(IncompatibleError, match="import --from megatron"):
        dc.load({}, run)


@pytest.mark.parametrize("tracker", ["latest_train_state.pt", "latest_checkpointed_iteration.txt"])
def test_a_tracker_behind_a_complete_newer_iteration_is_followed_with_a_word(
    tmp_path: Path, tracker: str, caplog: pytest.LogCaptureFixture
) -> None:
    run = run_of(tmp_path / "run", 9_999_999, 90)
    run_of(run, 10_000_001, complete=False)
    track(run, 9_999_999, tracker)
    with caplog.at_level(logging.WARNING, "dist_ckpt"):
        assert imported_step(run, tmp_path / "a") == 9_999_999
        assert not caplog.records  # the newer one is not complete
        run_of(run, 10_000_000)
        assert imported_step(run, tmp_path / "b") == 9_999_999
    (record,) = caplog.records
    assert f"give {run}/iter_10000000" in record.getMessage()
    assert imported_step(run / "iter_10000000", tmp_path / "c") == 10_000_000
    assert len(caplog.records) == 1


def test_a_released_model_says_nothing_of_iterations(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = run_of(tmp_path / "run", 100)
    shutil.copytree(MADE, run / "release")
    track(run, "release\n", "latest_checkpointed_iteration.txt")
    assert imported_step(run, tmp_path / "a") == 12
    assert not caplog.records


def test_without_a_tracker_the_iterations_are_listed(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", 100, 200)
    run_of(run, 300, complete=False)
    with pytest.raises(NotFoundError, match=r"iter_0000200\. Complete.*0000200, iter_0000100$"):
        imports.from_megatron(run, tmp_path / "ours")
    with pytest.raises(IncompatibleError, match="import --from megatron"):
        dc.load({}, run)
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize(
    ("step", "tracker", "message"),
    [
        (300, "latest_checkpointed_iteration.txt", "iter_0000300: the folder that the tracker"),
        (300, "latest_train_state.pt", "iter_0000300: the folder that the tracker"),
        ("../x", "latest_checkpointed_iteration.txt", "names '../x'"),
        ("../x", "latest_train_state.pt", "names '../x'"),
        (-5, "latest_train_state.pt", "names '-5'"),
        (None, "latest_train_state.pt", "names 'None'"),
        ("²", "latest_checkpointed_iteration.txt", "not an iteration"),
    ],
)
def test_a_tracker_that_names_nothing_lists_the_iterations(
    tmp_path: Path, step: Any, tracker: str, message: str
) -> None:
    run = run_of(tmp_path / "run", 100)
    track(run, step, tracker)
    with pytest.raises(NotFoundError, match=rf"{message}.*Complete iterations: iter_0000100$"):
        imports.from_megatron(run, tmp_path / "ours")


def test_a_tracker_whose_step_is_no_integer_is_refused(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", 100)
    track(run, torch.tensor(1.5))
    with pytest.raises(CorruptError, match="step is not an integer"):
        imports.from_megatron(run, tmp_path / "ours")
