"""`dc.build`: a model from the stored configuration, by the caller's table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dist_ckpt as dc
from dist_ckpt.core.checkpoint import open_checkpoint
from dist_ckpt.core.comm.session import Session
from dist_ckpt.core.loading import build as building
from dist_ckpt.core.shard_io.read.open_files import read_objects
from dist_ckpt.errors import CorruptError, IncompatibleError, NotFoundError
from dist_ckpt.testing.thread_channel import TEST_CONFIG
from ranks import errors_of, try_ranks


class Ddl(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = config
        self.inner = nn.Linear(config["dim"], config["classes"], dtype=config["dtype"])
        self.register_buffer("seen", torch.zeros(1))


CONFIG = {"dim": 4, "classes": 3, "dtype": torch.float64}


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint of a run, with an optimizer beside the model."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    model = trained()
    state = {"model": model, "optim": torch.optim.AdamW(model.parameters()), "step": 3}
    dc.save(state, tmp_path / "run" / "step-3", step=3, kind="ddl", config=CONFIG)
    return tmp_path / "run" / "step-3"


def trained() -> Ddl:
    torch.manual_seed(5)
    model = Ddl(CONFIG)
    nn.init.constant_(model.get_buffer("seen"), 7)
    return model


def same(one: nn.Module, other: nn.Module) -> bool:
    mine, theirs = one.state_dict(), other.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[k], theirs[k]) for k in mine)


def test_the_model_is_made_from_the_stored_config_and_filled(path: Path) -> None:
    torch.manual_seed(1)
    model = dc.build(path, {"ddl": Ddl, "other": nn.Identity})
    assert same(model, trained())
    assert model.config == CONFIG
    assert same(dc.build(f"{path.parent}@latest", {"ddl": Ddl}), model)


def test_the_component_may_have_another_name(tmp_path: Path, path: Path) -> None:
    dc.save({"net[0]": trained()}, tmp_path / "ck", kind="ddl", config=CONFIG)
    assert same(dc.build(tmp_path / "ck", {"ddl": Ddl}, component="net[0]"), trained())
    message = r"no component 'model': give component= one of net\[0\]$"
    with pytest.raises(IncompatibleError, match=message):
        dc.build(tmp_path / "ck", {"ddl": Ddl})


def test_a_kind_that_the_table_lacks_is_told_with_what_it_has(path: Path) -> None:
    with pytest.raises(
        IncompatibleError, match="kind 'ddl', but the table has only baseline, other: add it"
    ):
        dc.build(path, {"other": Ddl, "baseline": Ddl})
    with pytest.raises(NotFoundError):
        dc.build(path.parent / "gone", {"ddl": Ddl})


@pytest.mark.parametrize("lacking", ["kind", "config"])
def test_without_kind_or_config_nothing_can_be_made(tmp_path: Path, path: Path, lacking: str):
    given: dict[str, Any] = {"kind": "ddl", "config": CONFIG}
    del given[lacking]
    dc.save({"model": trained()}, tmp_path / "ck", **given)
    with pytest.raises(IncompatibleError, match=f"was saved without {lacking}="):
        dc.build(tmp_path / "ck", {"ddl": Ddl})


@pytest.mark.parametrize(
    ("table", "options", "match"),
    [
        ([Ddl], {}, "table: give a dict"),
        ({1: Ddl}, {}, "table: give a dict"),
        ({"ddl": "Ddl"}, {}, r"table\['ddl'\] cannot be called"),
        ({"ddl": Ddl}, {"component": ""}, "component=''"),
        ({"ddl": Ddl}, {"component": "\udcff"}, "component='"),
        ({"ddl": lambda config: 5}, {}, r"table\['ddl'\] has returned a int"),
    ],
)
def test_arguments_that_make_no_sense_are_named(
    path: Path, table: Any, options: dict[str, Any], match: str
) -> None:
    with pytest.raises(TypeError, match=match):
        dc.build(path, table, **options)


def test_a_model_that_does_not_fit_is_refused_with_both_counts(path: Path) -> None:
    def larger(config: dict[str, Any]) -> nn.Module:
        return Ddl({**config, "dim": 5})

    with pytest.raises(IncompatibleError) as caught:
        dc.build(path, {"ddl": larger})
    assert "model.inner.weight" in str(caught.value)
    assert "has 18 parameters on this rank" in str(caught.value)
    assert "those of 'model' in the checkpoint: 15" in str(caught.value)


def test_what_is_replaced_by_another_kind_meanwhile_is_refused(path: Path) -> None:
    def late(config: dict[str, Any]) -> nn.Module:
        model = Ddl(config)
        dc.save({"model": model}, path, kind="other", config=CONFIG, overwrite=True)
        return model

    with pytest.raises(IncompatibleError, match="kind: 'other' there, 'ddl' here"):
        dc.build(path, {"ddl": late})


def test_what_is_replaced_by_another_config_meanwhile_is_refused(path: Path) -> None:
    def late(config: dict[str, Any]) -> nn.Module:
        model = Ddl(config)
        other = {**CONFIG, "classes": 5}
        dc.save({"model": model}, path, kind="ddl", config=other, overwrite=True)
        return model

    with pytest.raises(IncompatibleError, match=r"config\.classes: 5 there, 3 here"):
        dc.build(path, {"ddl": late})


def test_what_a_selector_names_is_held_until_the_model_is_filled(path: Path) -> None:
    run = dc.Run(path.parent)
    seen: list[str] = []
    run.metrics(3, {"loss": 0.5})

    def late(config: dict[str, Any]) -> nn.Module:
        seen.extend(run.checkpoints[0].leases)
        return Ddl(config)

    assert same(dc.build(f"{path.parent}@min:loss", {"ddl": late}), trained())
    assert len(seen) == 1
    assert not run.checkpoints[0].leases


def test_the_counts_are_those_of_the_component(tmp_path: Path, path: Path) -> None:
    state = {"net": trained(), "model": nn.Linear(2, 2)}
    dc.save(state, tmp_path / "two", kind="ddl", config=CONFIG)
    with pytest.raises(IncompatibleError, match="those of 'net' in the checkpoint: 15"):
        dc.build(tmp_path / "two", {"ddl": lambda config: nn.Linear(9, 9)}, component="net")


def test_what_is_deleted_while_it_is_described_is_not_called_damaged(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_late(*args: Any, **options: Any) -> Any:
        dc.delete(path)
        return read_objects(*args, **options)

    monkeypatch.setattr(open_checkpoint, "read_objects", read_late)
    with pytest.raises(NotFoundError, match="was replaced or deleted while it was read"):
        dc.build(path, {"ddl": Ddl})


def test_damage_is_an_error_and_no_model(path: Path) -> None:
    (attempt,) = path.iterdir()
    file = attempt / "model-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(CorruptError):
        dc.build(path, {"ddl": Ddl})


def build_as_ranks(path: Path, tables: list[Any], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    def build(rank: int, channel: Any, bulk: Any) -> nn.Module:
        session: Any = Session(channel, bulk, TEST_CONFIG)
        model: nn.Module = dc.build(path, tables[rank], group=session)
        return model

    monkeypatch.setattr(building, "session_of", lambda group: group)
    return try_ranks(build, world_size=len(tables), harness="threads")


def test_all_ranks_build_or_none_does(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(config: dict[str, Any]) -> nn.Module:
        raise ValueError("no room")

    done = build_as_ranks(path, [{"ddl": Ddl}, {"ddl": Ddl}], monkeypatch)
    assert [one.error for one in done] == [None, None]
    assert all(same(one.value, trained()) for one in done)
    for error in errors_of(build_as_ranks(path, [{"ddl": Ddl}, {"ddl": fails}], monkeypatch)):
        assert "no room" in str(error)
    for error in errors_of(
        build_as_ranks(path, [{"ddl": Ddl}, {"ddl": Ddl, "b": Ddl}], monkeypatch)
    ):
        assert "the ranks call build with different kinds" in str(error)
