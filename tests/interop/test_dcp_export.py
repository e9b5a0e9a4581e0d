"""Checkpoints as folders of DCP: `dcp.load` has every value, and a failure leaves nothing."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_state_dict

import dist_ckpt as dc
from dist_ckpt.core.storage.local.local_storage import LocalStorage
from dist_ckpt.errors import CorruptError, ExistsError, IncompatibleError
from dist_ckpt.interop import imports
from dist_ckpt.interop.dcp import export as dcp_export
from dist_ckpt.interop.dcp.export import export_folder
from dist_ckpt.interop.hf import export as hf
from fork_server import forked_python

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def trained(seed: int) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (seed + 1))
    model(torch.randn(5, 3)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def flat(value: Any, name: str = "") -> dict[str, Any]:
    if not isinstance(value, dict | list):
        return {name: value}
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return {k: v for key, child in items for k, v in flat(child, f"{name}.{key}").items()}


def assert_same(one: Any, other: Any) -> None:
    expected, found = flat(one), flat(other)
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert value.dtype == found[name].dtype, name
            assert torch.equal(value, found[name]), name
        else:
            assert value == found[name], name


@pytest.mark.parametrize("part_nbytes", [1 << 20, 24])
def test_what_dcp_loads_is_what_was_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part_nbytes: int
) -> None:
    monkeypatch.setattr(dcp_export, "_PART_NBYTES", part_nbytes)
    model, optimizer = trained(0)
    extra = {"empty": torch.zeros(0, 2), "scalar": torch.tensor(2.5), "names": ["a", (1, 2)]}
    dc.save({"model": model, "optim": optimizer, "extra": extra, "step": 7}, tmp_path / "ours")
    nbytes = export_folder(tmp_path / "ours", tmp_path / "dcp")
    assert nbytes == sum(path.stat().st_size for path in (tmp_path / "dcp").iterdir())
    model_state, optim_state = get_state_dict(*trained(1))
    blank = {"empty": torch.ones(0, 2), "scalar": torch.tensor(0.0), "names": []}
    found: dict[str, Any] = {"model": model_state, "optim": optim_state, "extra": blank, "step": 0}
    dcp.load(found, checkpoint_id=tmp_path / "dcp")
    expected_model, expected_optim = get_state_dict(model, optimizer)
    expected = {"model": expected_model, "optim": expected_optim, "extra": extra, "step": 7}
    assert_same(expected, found)
    # And back.
    imports.from_dcp(tmp_path / "dcp", tmp_path / "back", step=7)
    live = trained(2)
    state: dict[str, Any] = {"model": live[0], "optim": live[1], "extra": {}, "step": 0}
    dc.load(state, tmp_path / "back")
    assert_same(model.state_dict(), live[0].state_dict())
    assert_same(optimizer.state_dict(), live[1].state_dict())


def test_what_is_there_stays(tmp_path: Path) -> None:
    dc.save({"w": torch.ones(2)}, tmp_path / "ours")
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / "mine").write_text("x")
    with pytest.raises(ExistsError, match="choose another path"):
        export_folder(tmp_path / "ours", tmp_path / "dcp")
    assert [one.name for one in (tmp_path / "dcp").iterdir()] == ["mine"]


def test_what_is_put_there_meanwhile_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by another export to the same place, which has ended in the last moment."""
    dc.save({"model": {"w": torch.ones(4)}}, tmp_path / "ck")
    sync, new = LocalStorage.sync, tmp_path / "new"

    def others_are_faster(storage: LocalStorage, path: str) -> None:
        sync(storage, path)
        if path.endswith(".tmp"):
            new.mkdir()
            (new / ".metadata").write_text("theirs")

    monkeypatch.setattr(LocalStorage, "sync", others_are_faster)
    for export in (export_folder, hf.export_folder):
        with pytest.raises(ExistsError, match="was created meanwhile"):
            export(tmp_path / "ck", new)
        assert (new / ".metadata").read_text() == "theirs"
        assert sorted(one.name for one in tmp_path.iterdir()) == ["ck", "new"]
        (new / ".metadata").unlink()
        new.rmdir()


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    dc.save({"w": torch.ones(1000)}, tmp_path / "ours")
    path = next((tmp_path / "ours").glob("a1-*/*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptError):
        export_folder(tmp_path / "ours", tmp_path / "dcp")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["ours"]


def test_an_interrupt_while_torch_writes_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch makes a RuntimeError of it."""
    dc.save({"w": torch.ones(1 << 18)}, tmp_path / "ck")

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(LocalStorage, "create", lambda *_: Mock(write_at=interrupted))
    with pytest.raises(KeyboardInterrupt):
        export_folder(tmp_path / "ck", tmp_path / "new")
    assert [one.name for one in tmp_path.iterdir()] == ["ck"]


def test_tied_tensors_lie_there_once_and_are_tied_again(tmp_path: Path) -> None:
    table = torch.randn(1000, 8)
    dc.save({"model": {"embed": table, "head": table, "own": table.clone()}}, tmp_path / "ours")
    nbytes = export_folder(tmp_path / "ours", tmp_path / "dcp")
    assert nbytes < 2.5 * table.nbytes
    state = {"model": {name: torch.zeros(1000, 8) for name in ("embed", "head", "own")}}
    dcp.load(state, checkpoint_id=tmp_path / "dcp")
    assert all(torch.equal(one, table) for one in state["model"].values())
    imports.from_dcp(tmp_path / "dcp", tmp_path / "back")
    with dc.open(tmp_path / "back") as found:
        assert dict(found.index.catalog.aliases) == {"model.head": "model.embed"}
        assert [*found.index.catalog.tensors] == ["model.embed", "model.own"]
    imports.from_dcp(tmp_path / "dcp", tmp_path / "one", exclude="model.embed")
    with dc.open(tmp_path / "one") as found:
        assert sorted(found.tensors) == ["model.head", "model.own"]


@pytest.mark.parametrize("shape", [(3, 5, 7), (1, 40), (2, 30), (24,), ()])
def test_a_tensor_is_cut_whatever_its_shape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]
) -> None:
    monkeypatch.setattr(dcp_export, "_PART_NBYTES", 32)
    saved = torch.randn(shape, dtype=torch.float64)
    dc.save({"w": saved}, tmp_path / "ours")
    export_folder(tmp_path / "ours", tmp_path / "dcp")
    chunks = dcp.FileSystemReader(tmp_path / "dcp").read_metadata().state_dict_metadata["w"]
    assert isinstance(chunks, TensorStorageMetadata)
    assert all(chunk.sizes.numel() <= 4 for chunk in chunks.chunks)
    state = {"w": torch.zeros(shape, dtype=torch.float64)}
    dcp.load(state, checkpoint_id=tmp_path / "dcp")
    assert torch.equal(state["w"], saved)


LIMITED = """
import resource, sys
from dist_ckpt.cli import main
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]),) * 2)
main(["export", "--format", "dcp", *sys.argv[1:3]])
"""


def test_a_disk_that_fills_up_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    dc.save({"w": torch.ones(1 << 20), "v": [1, "x" * 100_000]}, tmp_path / "ours")
    # A limit of a file's size stands for the disk: it needs no rights. The first is met when room
    # is reserved, the second by torch in the middle of a tensor.
    command = [forked_python(), "-c", LIMITED, f"{tmp_path}/ours", f"{tmp_path}/dcp"]
    for most in (1 << 20, 4_250_000):
        done = subprocess.run(
            [*command, str(most)], capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 5, done.stderr
        assert re.search(r"tmp/__0_0\.distcp: File too large .*ulimit -f", done.stderr)
        assert "Traceback" not in done.stderr
        assert [one.name for one in tmp_path.iterdir()] == ["ours"]


def test_a_folder_in_the_source_is_refused(tmp_path: Path) -> None:
    dc.save({"w": torch.ones(2)}, tmp_path / "ours")
    (tmp_path / "link").symlink_to(tmp_path / "ours")
    for call in (export_folder, dcp_export.plan_export):
        for place in ("ours", "link"):
            with pytest.raises(ValueError, match="inside the source"):
                call(tmp_path / "ours", tmp_path / place / "dcp")
    assert len([*(tmp_path / "ours").iterdir()]) == 1


def test_files_of_others_are_exported_or_said_what_to_do_with(tmp_path: Path) -> None:
    save_file({"w": torch.arange(3)}, tmp_path / "model.safetensors")
    export_folder(tmp_path / "model.safetensors", tmp_path / "dcp")
    state = {"model": {"w": torch.zeros(3, dtype=torch.int64)}}
    dcp.load(state, checkpoint_id=tmp_path / "dcp")
    assert torch.equal(state["model"]["w"], torch.arange(3))
    with pytest.raises(IncompatibleError, match="import --from dcp"):
        export_folder(tmp_path / "dcp", tmp_path / "again")


def test_values_of_each_rank_are_refused_by_name(tmp_path: Path) -> None:
    dc.save({"w": torch.ones(2), "mine": dc.PerRank(5)}, tmp_path / "ours")
    with pytest.raises(
        IncompatibleError, match=r"mine has a value for each rank: leave it out \(exclude='mine', "
    ):
        export_folder(tmp_path / "ours", tmp_path / "dcp")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["ours"]
    export_folder(tmp_path / "ours", tmp_path / "dcp", exclude="mine")
    state = {"w": torch.zeros(2)}
    dcp.load(state, checkpoint_id=tmp_path / "dcp")
    assert torch.equal(state["w"], torch.ones(2))


def test_names_are_chosen_by_globs(tmp_path: Path) -> None:
    model, optimizer = trained(0)
    tied = model[0].weight.detach()
    state = {"model": model, "optim": optimizer, "first": tied, "note": {"a": 1, "b": [2]}}
    dc.save(state, tmp_path / "ours")
    export_folder(
        tmp_path / "ours", tmp_path / "dcp", include=["*.weight", "note"], exclude="optim"
    )
    metadata = dcp.FileSystemReader(tmp_path / "dcp").read_metadata()
    names = ["model.0.weight", "model.1.weight", "note.a", "note.b"]
    assert sorted(metadata.state_dict_metadata) == sorted(metadata.planner_data) == names
    export_folder(tmp_path / "ours", tmp_path / "one", include="first")
    loaded = {"first": torch.zeros(4, 3)}
    dcp.load(loaded, checkpoint_id=tmp_path / "one")
    assert torch.equal(loaded["first"], tied)
    for call in (export_folder, dcp_export.plan_export):
        with pytest.raises(ValueError, match="'nothing' matches no name"):
            call(tmp_path / "ours", tmp_path / "two", include="nothing")


def test_a_folder_may_have_a_long_name(tmp_path: Path) -> None:
    dc.save({"w": torch.ones(2)}, tmp_path / "ours")
    folder = tmp_path / ("\N{GRINNING FACE}" * 60)  # 240 bytes, of the 255 that a name may have
    assert export_folder(tmp_path / "ours", folder) > 0
    assert (folder / ".metadata").exists()
