"""Lightning's `Trainer` with the callback: killed, stopped and resumed, it trains the same."""

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

pytest.importorskip("lightning")

pytestmark = [pytest.mark.multi_process, pytest.mark.slow]

PROGRAM = "trained_by_lightning.py"
train = functools.partial(trained, PROGRAM)


@pytest.mark.parametrize(
    ("kind", "every", "die", "first"),
    [
        ("plain", 3, 17, 15),
        ("plain", 1, 13, 12),  # at the end of an epoch, and of its validation
        ("plateau", 1, 5, 4),  # a validation and what looks at it have just been
        ("steps", 1, 13, 12),  # Lightning counts steps, and would skip an epoch
        ("manual", 4, 7, 6),  # two optimizers, two steps in each batch
        ("accumulate", 3, 9, 6),
        ("average", 3, 8, 6),
        ("swa", 3, 20, 18),
        ("stream", 3, 8, 6),  # of unknown length, which Lightning reads ahead of
        ("workers", 3, 17, 15),
        ("generator", 3, 17, 15),  # which the loader draws its order from
        ("generator", 1, 13, 12),
    ],
)
def test_a_fit_that_was_killed_goes_on_bit_for_bit(
    kind: str, every: int, die: int, first: int, tmp_path: Path
) -> None:
    whole, rest = killed_and_whole(
        PROGRAM, tmp_path, "--kind", kind, "--every", str(every), die=die
    )
    check_config_matches(whole, rest, first=first)


def test_a_loader_with_a_state_goes_on_where_it_was(tmp_path: Path) -> None:
    pytest.importorskip("torchdata")
    check_config_matches(*killed_and_whole(PROGRAM, tmp_path, "--kind", "stateful", die=8), first=6)


@pytest.mark.parametrize("kind", ["norm", "fsdp"])
def test_ranks_go_on_bit_for_bit(kind: str, tmp_path: Path) -> None:
    whole, rest = killed_and_whole(PROGRAM, tmp_path, "--kind", kind, die=5, ranks=2)
    check_config_matches(whole, rest, first=3)


def test_a_fit_that_is_told_to_stop_saves_its_step_and_goes_on_there(tmp_path: Path) -> None:
    (whole,) = train(tmp_path / "whole")
    (first,) = train(tmp_path / "cut", "--stop", "16", code=75)
    assert first["stopped"] == first["step"] < 36
    (rest,) = train(tmp_path / "cut")
    assert [*first["seen"], *rest["seen"]] == whole["seen"]
    assert rest["weights"] == whole["weights"]


def test_one_rank_that_is_told_to_stop_stops_all(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", ranks=2)
    first = train(tmp_path / "cut", "--stop", "8", ranks=2, code=1)
    rest = train(tmp_path / "cut", ranks=2)
    for one, before, after in zip(whole, first, rest, strict=True):
        assert [*before["seen"], *after["seen"]] == one["seen"]
        assert after["weights"] == one["weights"]


def test_another_number_of_ranks_is_refused_or_begins_the_epoch_anew(tmp_path: Path) -> None:
    train(tmp_path / "run", "--stop", "8", ranks=2, code=1)
    (told,) = train(tmp_path / "run")
    assert "by 2 ranks, but 1 train now" in told["error"]
    assert 'on_reshard="drop"' in told["error"]
    (anew,) = train(tmp_path / "run", "--anew")
    assert sorted(anew["seen"][:48]) == [*range(48)]
    assert len(anew["seen"]) == 96  # two of three epochs, whole


def test_a_fit_that_early_stopping_has_ended_stays_ended_until_that_is_left_out(
    tmp_path: Path,
) -> None:
    (ended,) = train(tmp_path, "--kind", "ended")
    assert ended["step"] == 4  # in the midst of the first epoch
    (again,) = train(tmp_path, "--kind", "ended")
    assert (again["step"], again["seen"], again["weights"]) == (4, [], ended["weights"])
    (more,) = train(tmp_path, "--kind", "unstopped")
    (whole,) = train(tmp_path / "whole", "--kind", "unstopped")
    assert [*ended["seen"], *more["seen"]] == whole["seen"]


@pytest.mark.filterwarnings("ignore:The `srun` command", "ignore::FutureWarning")
def test_a_lightning_without_a_name_that_is_needed_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import lightning.pytorch as pl

    from dist_ckpt.integrations.lightning import callback

    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    for table, other in (("NEEDED", "NEEDED_OF_LOADER"), ("NEEDED_OF_LOADER", "NEEDED")):
        with monkeypatch.context() as patch:
            patch.setattr(callback, table, (("fit_loop.gone", "nothing"),))
            patch.setattr(callback, other, ())
            with pytest.raises(dc.IncompatibleError, match=r"lightning 2\..*gone: use 2\.6"):
                callback.check_names(trainer)


def test_a_config_file_of_lightning_cli_can_name_the_callback() -> None:
    jsonargparse: Any = pytest.importorskip("jsonargparse")
    import lightning.pytorch as pl

    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(pl.Callback, "callback")
    name = "dist_ckpt.integrations.lightning.LightningCheckpoint"
    made = parser.parse_args([f"--callback={name}", "--callback.root=runs/fit"])
    assert made.callback.init_args.root == "runs/fit"


def test_other_batches_are_refused(tmp_path: Path) -> None:
    train(tmp_path / "run", "--stop", "8", code=75)
    (told,) = train(tmp_path / "run", "--batch-size", "8")
    assert "an epoch of 12 batches on each rank, but now it has 6" in told["error"]


def test_a_checkpoint_of_lightning_beside_ours_is_refused(tmp_path: Path) -> None:
    code = (
        "import runpy, sys, lightning.pytorch as pl; sys.argv = ['x', sys.argv[1]]; "
        "fit = pl.Trainer.fit; "
        "pl.Trainer.fit = lambda self, *a, **k: (fit(self, *a, **k), "
        "self.save_checkpoint(sys.argv[1] + '/old.ckpt')); "
        "runpy.run_path('tests/helpers/frameworks/trained_by_lightning.py', run_name='__main__')"
    )
    done = run_python(["-c", code, str(tmp_path)], Path.cwd())
    assert done.returncode == 0, done.stderr[-3000:]
    (told,) = train(tmp_path, "--ckpt-path", str(tmp_path / "old.ckpt"))
    assert "leave ckpt_path out" in told["error"]


def test_a_checkpoint_of_others_is_not_taken_for_one_of_the_callback(tmp_path: Path) -> None:
    train(tmp_path / "run")
    run = dc.Run(tmp_path / "run")
    assert "val_loss" in run.find(36).metrics
    state = {"model": 1}
    dc.save(state, tmp_path / "other" / "step-00000003", step=3)
    (told,) = train(tmp_path / "other")
    assert "model" in told["error"]


def test_the_other_package_is_known_too(tmp_path: Path) -> None:
    pytest.importorskip("pytorch_lightning")
    (found,) = train(tmp_path / "run", LIGHTNING="pytorch_lightning")
    assert found["step"] == 36


def test_the_page_leads_from_zero_to_a_resumed_run(tmp_path: Path) -> None:
    (program,) = programs_of("lightning.md")
    for epochs, step in ((2, 16), (3, 24)):
        text = program.replace("max_epochs=2", f"max_epochs={epochs}")
        (tmp_path / "program.py").write_text(text)
        done = run_python(["program.py"], tmp_path)
        assert done.returncode == 0, done.stderr[-6000:]
        with dc.open(f"{tmp_path}/runs/fit@latest") as found:
            assert found.step == step


@pytest.mark.filterwarnings("ignore")
def test_an_export_is_resumed_by_lightning_itself(tmp_path: Path) -> None:
    """Two epochs with our callback, then two more from the exported file: as four in one fit."""
    import lightning.pytorch as pl

    from dist_ckpt.integrations.lightning import LightningCheckpoint
    from dist_ckpt.interop.frameworks import write_files

    class Module(pl.LightningModule):  # type: ignore[misc]  # it may not be installed
        def __init__(self) -> None:
            super().__init__()
            self.body = torch.nn.Linear(8, 8)
            torch.nn.init.constant_(self.body.weight, 0.5)
            torch.nn.init.zeros_(self.body.bias)

        def training_step(self, batch: Any, _: int) -> Any:
            return self.body(batch[0]).square().mean()

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    def fit(epochs: int, *callbacks: Any, path: Path | None = None) -> dict[str, torch.Tensor]:
        module, data = Module(), torch.utils.data.TensorDataset(torch.arange(96.0).reshape(12, 8))
        options = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
        trainer = pl.Trainer(
            max_epochs=epochs,
            callbacks=[*callbacks],
            accelerator="cpu",
            default_root_dir=tmp_path,
            **options,
        )
        trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=4), ckpt_path=path)
        weights: dict[str, torch.Tensor] = module.state_dict()
        return weights

    fit(2, LightningCheckpoint(tmp_path / "run", save=dc.at_end))
    write_files.export_lightning(f"{tmp_path}/run@latest", tmp_path / "a.ckpt")
    found, expected = fit(4, path=tmp_path / "a.ckpt"), fit(4)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert Module.load_from_checkpoint(tmp_path / "a.ckpt").body.weight.shape == (8, 8)


def test_checkpointing_that_is_turned_off_refuses_our_callback_too(tmp_path: Path) -> None:
    """As docs/lightning.md says: leave `enable_checkpointing` out."""
    import lightning.pytorch as pl

    from dist_ckpt.integrations.lightning import LightningCheckpoint

    callback = LightningCheckpoint(tmp_path)
    with pytest.raises(Exception, match="enable_checkpointing=False"):
        pl.Trainer(callbacks=[callback], accelerator="cpu", enable_checkpointing=False)
    trainer = pl.Trainer(callbacks=[callback], accelerator="cpu", logger=False)
    assert trainer.checkpoint_callbacks == [callback], "Lightning adds none of its own"
