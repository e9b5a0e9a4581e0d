"""A loop with accelerate: killed, stopped and resumed, it trains the same; `save_state` as well."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

import dist_ckpt as dc
from framework_programs import (
    check_config_matches,
    killed_and_whole,
    programs_of,
    run_python,
    trained,
)

accelerate: Any = pytest.importorskip("accelerate")

pytestmark = [
    pytest.mark.multi_process,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

PROGRAM = "trained_by_accelerate.py"
train = functools.partial(trained, PROGRAM)


@pytest.mark.parametrize(
    ("kind", "every", "die", "first"),
    [
        ("plain", 3, 17, 15),
        ("plain", 1, 13, 12),  # at the end of an epoch
        ("accumulate", 3, 15, 12),
        ("stream", 3, 8, 6),
        ("workers", 3, 17, 15),
        ("generator", 3, 17, 15),  # which the loader draws its order from
        ("generator", 1, 13, 12),
    ],
)
def test_a_loop_that_was_killed_goes_on_bit_for_bit(
    kind: str, every: int, die: int, first: int, tmp_path: Path
) -> None:
    whole, rest = killed_and_whole(
        PROGRAM, tmp_path, "--kind", kind, "--every", str(every), die=die
    )
    check_config_matches(whole, rest, first=first)
    assert rest[0]["batches"] == whole[0]["batches"]


def test_an_order_that_no_seed_says_is_in_the_checkpoint(tmp_path: Path) -> None:
    (first,) = train(tmp_path, "--kind", "unseeded", "--stop", "5", code=75)
    (rest,) = train(tmp_path, "--kind", "unseeded")
    assert sorted([*first["seen"], *rest["seen"]][:48]) == [*range(48)]


@pytest.mark.parametrize("kind", ["norm", "fsdp"])
def test_ranks_go_on_bit_for_bit(kind: str, tmp_path: Path) -> None:
    whole, rest = killed_and_whole(PROGRAM, tmp_path, "--kind", kind, die=5, ranks=2)
    check_config_matches(whole, rest, first=3)


def test_a_loop_that_is_told_to_stop_goes_on_there(tmp_path: Path) -> None:
    (whole,) = train(tmp_path / "whole")
    (first,) = train(tmp_path / "cut", "--stop", "16", code=75)
    (rest,) = train(tmp_path / "cut")
    assert [*first["seen"], *rest["seen"]] == whole["seen"]
    assert rest["weights"] == whole["weights"]
    assert "loss" in dc.Run(tmp_path / "cut").find(36).metrics


def test_other_ranks_or_batches_are_refused_or_begin_the_epoch_anew(tmp_path: Path) -> None:
    train(tmp_path, "--stop", "8", ranks=2, code=1)
    (told,) = train(tmp_path)
    assert "by 2 ranks, but 1 train now" in told["error"]
    (anew,) = train(tmp_path, "--anew", "--stop", "2", code=75)
    (told,) = train(tmp_path, "--batch-size", "8")
    assert "an epoch of 12 batches on each rank, but now it has 6" in told["error"]
    assert len(anew["seen"]) >= 8


def test_a_loop_that_is_left_early_is_saved_at_its_step(tmp_path: Path) -> None:
    from dist_ckpt.integrations.accelerate import AcceleratedRun

    accelerator, model, _ = prepared()
    loader = accelerator.prepare(torch.utils.data.DataLoader(torch.ones(8, 4), batch_size=1))  # type: ignore[arg-type]
    with AcceleratedRun(accelerator, tmp_path, save=dc.every(steps=5), background=False) as run:
        for _ in run.epochs(3):
            for number, batch in enumerate(run.batches(loader), 1):
                accelerator.backward(model(batch).sum())
                if number == 5:
                    break
    assert [one.step for one in dc.checkpoints(tmp_path)] == [5, 10, 15]
    position: Any = dc.open(tmp_path / "step-00000010").objects["position"]
    assert (position["epoch"], position["batches"]) == (2, 0)


def test_a_second_loop_over_batches_would_lose_its_place_and_is_refused(tmp_path: Path) -> None:
    from dist_ckpt.integrations.accelerate import AcceleratedRun

    accelerator, _, _ = prepared()
    loader = accelerator.prepare(torch.utils.data.DataLoader(torch.ones(2, 4)))  # type: ignore[arg-type]
    with AcceleratedRun(accelerator, tmp_path, save=dc.every(steps=5)) as run:
        for _ in run.epochs(2):
            assert len([*run.batches(loader)]) == 2
            with pytest.raises(ValueError, match="one position in the data"):
                next(run.batches(loader))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"state": {"optim": 1}}, "the state has the keys optim"),
        ({"on_reshard": "anew"}, "'anew': give"),
    ],
)
def test_what_an_adapter_cannot_take_is_refused(
    options: dict[str, Any], told: str, tmp_path: Path
) -> None:
    from dist_ckpt.integrations.accelerate import AcceleratedRun

    accelerator, _, _ = prepared()
    with pytest.raises(ValueError, match=told):
        AcceleratedRun(accelerator, tmp_path, **options)


def test_an_accelerate_without_a_name_that_is_needed_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from dist_ckpt.integrations import accelerate as prepared_objects

    accelerator, _, _ = prepared()
    monkeypatch.setattr(prepared_objects, "NEEDED", ("_gone",))
    with pytest.raises(dc.IncompatibleError, match=r"accelerate 1\..* no Accelerator\._gone"):
        prepared_objects.check(accelerator)


def prepared(project: Path | None = None, **options: Any) -> tuple[Any, Any, Any]:
    """Return an accelerator that is attached, and a model and an optimizer that have trained."""
    if project is not None:
        naming = {"automatic_checkpoint_naming": True, "total_limit": 2}
        config = accelerate.utils.ProjectConfiguration(project_dir=str(project), **naming)
        options["project_config"] = config
    accelerator = accelerate.Accelerator(cpu=True, **options)
    model = torch.nn.Linear(4, 4)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.backward(model(torch.ones(2, 4)).sum())
    optimizer.step()
    return accelerator, model, optimizer


def test_save_state_and_load_state_are_ours(tmp_path: Path) -> None:
    from dist_ckpt.integrations.accelerate import attach

    accelerator, model, optimizer = prepared()
    attach(accelerator)
    weight = model.weight.detach().clone()
    moment = optimizer.state_dict()["state"][0]["exp_avg"].clone()
    accelerator.save_state(tmp_path / "state")
    drawn = torch.rand(3)
    accelerator.save_state(tmp_path / "state")  # in its place
    with torch.no_grad():
        model.weight.zero_()
        optimizer.state_dict()["state"][0]["exp_avg"].zero_()
    accelerator.load_state(tmp_path / "state")
    assert torch.equal(model.weight, weight)
    assert torch.equal(optimizer.state_dict()["state"][0]["exp_avg"], moment)
    assert not torch.equal(torch.rand(3), drawn)
    assert dc.verify(tmp_path / "state").ok
    with pytest.raises(TypeError, match="max_shard_size"):
        accelerator.save_state(tmp_path / "state", max_shard_size=1)
    handle = accelerator.register_save_state_pre_hook(lambda *args: None)
    with pytest.raises(ValueError, match="register_for_checkpointing"):
        accelerator.save_state(tmp_path / "state")
    handle.remove()


def test_a_project_names_and_limits_what_is_saved(tmp_path: Path) -> None:
    from dist_ckpt.integrations.accelerate import attach

    accelerator, _, _ = prepared(tmp_path)
    attach(accelerator)
    with pytest.raises(dc.NotFoundError, match="has no checkpoint_N"):
        accelerator.load_state()
    for _ in range(3):
        accelerator.save_state()
    kept = sorted(one.name for one in (tmp_path / "checkpoints").glob("checkpoint_*"))
    assert kept == ["checkpoint_1", "checkpoint_2"]
    accelerator.load_state()


def test_what_is_not_ours_to_remove_stays_and_fails_no_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from dist_ckpt.integrations.accelerate import attach

    accelerator, _, _ = prepared(tmp_path)
    accelerator.save_state()
    attach(accelerator)
    accelerator.save_state()
    for path in (tmp_path / "checkpoints" / "checkpoint_1").glob("a*"):  # an attempt of no name
        path.rename(path.parent / "a1-x")
    for _ in range(2):
        accelerator.save_state()
    kept = sorted(one.name for one in (tmp_path / "checkpoints").glob("checkpoint_*"))
    assert kept == [f"checkpoint_{number}" for number in range(4)]
    assert "checkpoint_1 stays, above total_limit=2: " in caplog.text


def test_what_accelerate_has_written_is_refused_by_name(tmp_path: Path) -> None:
    from dist_ckpt.integrations.accelerate import attach

    accelerator, _, _ = prepared()
    accelerator.save_state(str(tmp_path / "own"))
    attach(accelerator)
    with pytest.raises(dc.IncompatibleError, match="written by accelerate itself"):
        accelerator.load_state(tmp_path / "own")


def test_the_page_leads_from_zero_to_a_resumed_run(tmp_path: Path) -> None:
    loop, state = programs_of("accelerate.md")
    for epochs, step in ((2, 16), (3, 24)):
        (tmp_path / "program.py").write_text(loop.replace("epochs(2)", f"epochs({epochs})"))
        done = run_python(["program.py"], tmp_path)
        assert done.returncode == 0, done.stderr[-6000:]
        with dc.open(f"{tmp_path}/runs/loop@latest") as found:
            assert found.step == step
    (tmp_path / "state.py").write_text(state)
    done = run_python(["state.py"], tmp_path)
    assert done.returncode == 0, done.stderr[-6000:]


@pytest.mark.filterwarnings("ignore")
def test_an_export_is_resumed_by_accelerate_itself(tmp_path: Path) -> None:
    from dist_ckpt.integrations.accelerate import AcceleratedRun
    from dist_ckpt.interop.frameworks import write_files

    def prepared() -> Any:
        accelerator, model = accelerate.Accelerator(cpu=True), torch.nn.Linear(4, 4)
        torch.nn.init.constant_(model.weight, 0.5)
        torch.nn.init.zeros_(model.bias)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        loader: Any = torch.utils.data.DataLoader(torch.arange(32.0).reshape(8, 4), batch_size=2)  # type: ignore[arg-type]
        return accelerator, *accelerator.prepare(model, optimizer, scheduler, loader)

    def step(objects: list[Any], batch: Any) -> None:
        accelerator, model, optimizer, scheduler = objects
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

    *first, loader = prepared()
    with AcceleratedRun(first[0], tmp_path / "run", save=dc.at_end) as run:
        for _ in run.epochs(until=2):
            for batch in run.batches(loader):
                step(first, batch)
    write_files.export_accelerate(f"{tmp_path}/run@latest", tmp_path / "out")
    *second, loader = prepared()
    second[0].load_state(tmp_path / "out")
    for batch in loader:
        step(first, batch)
        step(second, batch)
    assert all(map(torch.equal, first[1].parameters(), second[1].parameters()))
    assert first[3].state_dict() == second[3].state_dict()
