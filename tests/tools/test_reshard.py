"""Rewriting checkpoints for other ranks, against what a load makes of them."""

from __future__ import annotations

import gc
import tracemalloc
from dataclasses import replace

import pytest

import dist_ckpt as dc
from dist_ckpt.core.format.index.index import Component
from dist_ckpt.core.format.objects.objects_file import ObjectsFile
from dist_ckpt.core.storage.local.local_storage import LocalStorage

pytest.importorskip("torch")

import torch

from ranks import save_on_threads
from written import catalog_of, one_cell, random_tensor, rows, save

OBJECTS = {0: {"objects.msgpack": ObjectsFile()}}


@pytest.mark.parametrize("world_size", [1, 2, 8])
def test_what_was_saved_on_a_mesh_is_resharded_to_fewer_and_to_more_ranks(world_size, tmp_path):
    weight = torch.arange(16.0).reshape(4, 4)
    states = [
        {"model": {"w": weight[rank : rank + 1].clone()}, "loader": dc.PerRank({"position": rank})}
        for rank in range(4)
    ]
    source, target = str(tmp_path / "source"), tmp_path / "target"
    even = dc.ShardingConfig.even(4)
    save_on_threads(LocalStorage(), states, source, sharding=even)
    dc.reshard(source, target, world_size=world_size)
    assert dc.verify(target).ok
    with dc.open(target) as checkpoint:
        assert (checkpoint.world_size, checkpoint.mesh) == (world_size, {"dp": 4})
        assert torch.equal(checkpoint["model.w"][...].torch(), weight)
        assert dict(checkpoint.index.catalog.per_rank["loader"]) == {
            rank: rank % world_size for rank in range(4)
        }
        assert checkpoint.per_rank["loader"] == {rank: {"position": rank} for rank in range(4)}


def test_a_key_whose_tensors_lie_in_files_of_two_stems_is_as_one(tmp_path):
    shape = (6, 2)
    tensors = {
        f"{name}.w": random_tensor(shape, rows(shape, 2), seed=seed)
        for seed, name in enumerate(("model", "frozen"))
    }
    catalog = catalog_of(tensors, 2, ("model", "frozen"))
    parts = Component("model", "model"), Component("model", "frozen")
    save(tmp_path / "ck", tensors, catalog=replace(catalog, components=parts), objects=OBJECTS)
    dc.reshard(tmp_path / "ck", tmp_path / "target", world_size=3)
    for path in (tmp_path / "ck", tmp_path / "target"):
        assert dc.verify(path).ok
        state = {name: {"w": torch.zeros(shape)} for name in ("model", "frozen")}
        dc.load(state, path)
        for name, part in state.items():
            assert part["w"].numpy().tobytes() == tensors[f"{name}.w"].data


def test_a_target_within_the_source_is_refused_whatever_link_leads_there(tmp_path):
    dc.save({"w": torch.arange(4.0)}, tmp_path / "ck")
    (tmp_path / "other").symlink_to(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path / "ck")
    for target in ("ck/inner", "other/ck/inner", "link/inner"):
        with pytest.raises(ValueError, match="is inside the source"):
            dc.reshard(tmp_path / "ck", tmp_path / target, world_size=2)
    for target in ("other/ck", "link"):
        with pytest.raises(ValueError, match="are both"):
            dc.reshard(tmp_path / "ck", tmp_path / target, world_size=2)
    assert dc.verify(tmp_path / "ck").ok


def test_a_checkpoint_can_be_resharded_in_place_if_that_is_asked_for(tmp_path):
    save_on_threads(LocalStorage(), [{"model": {"w": torch.arange(8.0)}}], str(tmp_path / "ck"))
    with pytest.raises(ValueError, match=r"are both .*ck: .*overwrite=True, .*--overwrite"):
        dc.reshard(tmp_path / "ck", tmp_path / "ck", world_size=2)
    dc.reshard(tmp_path / "ck", tmp_path / "ck", world_size=2, overwrite=True)
    (tmp_path / "link").symlink_to(tmp_path / "ck")
    dc.reshard(tmp_path / "ck", tmp_path / "link", world_size=4, overwrite=True)
    assert dc.verify(tmp_path / "ck").ok
    with dc.open(tmp_path / "ck") as checkpoint:
        assert checkpoint.world_size == 4
        assert checkpoint["model.w"][...].torch().tolist() == list(range(8))
    assert [entry.name[:3] for entry in (tmp_path / "ck").iterdir()] == ["a3-"]


def test_memory_does_not_grow_with_the_ranks(tmp_path):
    """Also not until the collector comes: of each rank's files one window was held."""
    dc.save({"w": torch.ones(16 << 20)}, tmp_path / "ck")  # 64 MiB
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        dc.reshard(tmp_path / "ck", tmp_path / "target", world_size=8)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        gc.enable()
    assert peak < 24 << 20


def test_overwrite_is_a_flag(tmp_path):
    with pytest.raises(TypeError, match="overwrite='no': give True or False"):
        dc.reshard(tmp_path / "a", tmp_path / "b", world_size=2, overwrite="no")  # type: ignore[arg-type]


def test_a_key_whose_value_is_gone_is_found_before_anything_is_written(tmp_path):
    tensors = {"model.b": random_tensor((2,), one_cell((2,)))}
    catalog = replace(catalog_of(tensors, 1), per_rank={"rng": ((("dp", 0), 0),)})
    files = {0: {"objects.msgpack": ObjectsFile(), "objects-00000.msgpack": ObjectsFile()}}
    save(tmp_path / "ck", tensors, catalog=catalog, objects=files)
    with pytest.raises(dc.CorruptError, match=r"objects-00000\.msgpack lacks rng of \('dp', 0\)"):
        dc.reshard(tmp_path / "ck", tmp_path / "target", world_size=2)
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize("what", ["overwritten", "deleted"])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_source_that_is_replaced_while_it_is_read_is_not_called_damaged(
    what, number, tmp_path, monkeypatch
):
    states = [{"model": {"w": torch.ones(4) * rank}, "lr": 1.0} for rank in range(2)]
    source, target = tmp_path / "source", tmp_path / "target"
    even = dc.ShardingConfig.even(2)
    save_on_threads(LocalStorage(), states, str(source), sharding=even)
    opened: list[str] = []
    real = LocalStorage.open

    def open_late(storage, path):
        if "/source/a" in path and not path.endswith(".json") and len(opened) < number:
            opened.append(path)
            if len(opened) == number and what == "deleted":
                dc.delete(source)
            elif len(opened) == number:
                save_on_threads(LocalStorage(), states, str(source), sharding=even, overwrite=True)
        return real(storage, path)

    monkeypatch.setattr(LocalStorage, "open", open_late)
    with pytest.raises(dc.NotFoundError, match="was replaced or deleted while it was read"):
        dc.reshard(source, target, world_size=1)
    assert len(opened) == number
    assert not target.exists() or not any(target.glob("a*/index.json"))
