"""Checkpoints that frameworks made, imported: every value bit for bit, and nothing is run.

The files were made by `tests/helpers/makers/foreign_makers.py` with the libraries themselves;
versions lie beside them. Where a library is installed they are made anew as well.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import struct
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import dist_ckpt as dc
import foreign_makers
from dist_ckpt.core.storage.local.local_storage import LocalStorage
from dist_ckpt.errors import (
    CheckpointError,
    CorruptError,
    ExistsError,
    IncompatibleError,
    NotFoundError,
    StorageError,
)
from dist_ckpt.interop import imports
from dist_ckpt.interop.frameworks import write_files
from dist_ckpt.testing.faulty_storage import FaultyStorage
from foreign_makers import Net, adamw, live_state

GOLDEN = Path(__file__).parents[1] / "golden" / "foreign"
KINDS = [*foreign_makers.KINDS]
IMPORTS: dict[str, Callable[..., Any]] = {
    "lightning": imports.from_lightning,
    "accelerate": imports.from_accelerate,
    "deepspeed": imports.from_deepspeed,
    "megatron": imports.from_megatron,
}


def system(kind: str) -> str:
    return kind.partition("-")[0]


def source(kind: str, folder: Path) -> Path:
    return folder / "made" / ("a.ckpt" if kind == "lightning" else "")


def copied(kind: str, tmp_path: Path) -> Path:
    shutil.copytree(GOLDEN / kind, tmp_path / kind)
    return source(kind, tmp_path / kind)


def imported(kind: str, made: Path, target: Path, **options: Any) -> Any:
    return IMPORTS[system(kind)](made, target, **options)


class Lit(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()


def live_of(kind: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return a model and an optimizer with other values than those that were saved."""
    torch.manual_seed(99)
    if kind == "accelerate-fsdp":
        net: torch.nn.Module = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 3))
        return net, torch.optim.AdamW(net.parameters())
    if kind == "lightning":
        lit = Lit()
        return lit, adamw(lit.net)
    net = Net()
    return net, adamw(net)


def check(kind: str, folder: Path, tmp_path: Path, world_size: int) -> None:
    expected = load_file(folder / "expected.safetensors")
    told = json.loads((folder / "expected.json").read_text())
    report = imported(kind, source(kind, folder), tmp_path / "ours", world_size=world_size)
    assert dc.verify(tmp_path / "ours").ok
    with dc.open(tmp_path / "ours") as found:
        assert found.world_size == world_size
        assert found.step == (None if system(kind) == "accelerate" else told["step"])
        stored = {name: found[name][...].torch() for name in found.tensors}
        assert report.num_tensors == len(found.index.catalog.tensors)
    if kind == "megatron":
        assert_same(expected, {n.replace("optim.", "optimizer."): v for n, v in stored.items()})
        return
    model, optimizer = live_of(kind)
    live = {"model": model, "optim": optimizer}
    cast = "model.frozen" if system(kind) == "deepspeed" else None
    dc.load(live, tmp_path / "ours", include=["model", "optim"], cast=cast)
    state = live_state(model, optimizer)
    if kind == "accelerate-fsdp":
        state = {name.replace("state.model.", "state."): value for name, value in state.items()}
    # DeepSpeed keeps what is frozen in bf16.
    assert_same({n: v.to(state[n].dtype) for n, v in expected.items()}, state)


def assert_same(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> None:
    assert expected.keys() <= found.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert found[name].shape == value.shape, name
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_framework_saved_loads_into_live_objects(
    kind: str, world_size: int, tmp_path: Path
) -> None:
    check(kind, GOLDEN / kind, tmp_path, world_size)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", KINDS)
def test_what_the_library_makes_now_loads_as_well(kind: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(system(kind)) is None:
        pytest.skip(f"{foreign_makers.LIBRARIES[system(kind)]} is not installed")
    if kind == "accelerate-fsdp" and importlib.util.find_spec("lightning") is None:
        pytest.skip("run by hand, with the other libraries")
    foreign_makers.run(kind, tmp_path / kind)
    check(kind, tmp_path / kind, tmp_path, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_a_load_names_the_line_to_type(kind: str, tmp_path: Path) -> None:
    made = copied(kind, tmp_path)
    with pytest.raises(IncompatibleError, match=f"import --from {system(kind)} {made} TARGET"):
        dc.load({}, made)


# --- values beside tensors --------------------------------------------------------------------


def values_of(kind: str, tmp_path: Path, **options: Any) -> dict[Any, Any]:
    imported(kind, copied(kind, tmp_path), tmp_path / "ours", **options)
    state: dict[Any, Any] = {}
    dc.load(state, tmp_path / "ours")
    return state


def test_all_that_lightning_keeps_is_there(tmp_path: Path) -> None:
    state = values_of("lightning", tmp_path)
    theirs = torch.load(tmp_path / "lightning" / "made" / "a.ckpt", weights_only=False)
    assert state["hyper_parameters"] == {"where": "a", "width": 5}
    for name in theirs.keys() - {"state_dict", "optimizer_states", "callbacks"}:
        assert state[name] == theirs[name], name
    assert str(state["callbacks"]) == str(theirs["callbacks"])
    assert state.keys() == theirs.keys() - {"state_dict", "optimizer_states"} | {"model", "optim"}
    with dc.open(tmp_path / "ours") as found:
        assert found.step == theirs["global_step"] == 4


def test_generators_of_accelerates_ranks_are_set_again(tmp_path: Path) -> None:
    import random

    import numpy as np

    made = copied("accelerate", tmp_path)
    imported("accelerate", made, tmp_path / "ours")
    theirs = torch.load(made / "random_states_0.pkl", weights_only=False)
    kept = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        state: dict[str, Any] = {"rng": dc.RNG(), "custom_checkpoint": None}
        dc.load(state, tmp_path / "ours", include=["rng", "custom_checkpoint"])
        assert state["custom_checkpoint"] == {"seen": 8}
        assert random.getstate() == theirs["random_state"]
        assert str(np.random.get_state()) == str(theirs["numpy_random_seed"])
        assert torch.equal(torch.get_rng_state(), theirs["torch_manual_seed"])
    finally:
        random.setstate(kept[0])
        np.random.set_state(kept[1])
        torch.set_rng_state(kept[2])
    imported("accelerate-ranks", copied("accelerate-ranks", tmp_path), tmp_path / "two")
    with dc.open(tmp_path / "two") as found:
        assert dict(found.index.catalog.per_rank["rng"]).keys() == {0, 1}


def test_what_deepspeed_tells_besides_is_there(tmp_path: Path) -> None:
    state = values_of("deepspeed-zero2", tmp_path)
    assert state["zero"]["loss_scaler"]["class"] == "LossScaler"
    assert (state["seen"], state["global_samples"]) == (8, 24)
    assert state["lr_scheduler"]["last_epoch"] == 3
    assert state["optim"]["param_groups"][0]["params"] == [
        "model.inner.bias",
        "model.norm.weight",
        "model.norm.bias",
    ]


def test_objects_and_common_values_of_megatron_are_there(tmp_path: Path) -> None:
    state = values_of("megatron", tmp_path)
    assert (state["iteration"], state["args"]) == (12, {"lr": 0.1})
    for rank in range(2):
        name = f"decoder.layers.extra_state/shard_{rank}_2"
        assert state["objects"][name] == [{"scale": 2.0, "seen": rank}]


# --- what is refused --------------------------------------------------------------------------


class Hostile:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


# Of each kind the files that are pickles.
PICKLES = {
    "lightning": ["a.ckpt"],
    "accelerate": ["optimizer.bin", "scheduler.bin", "random_states_0.pkl"],
    "accelerate-bin": ["pytorch_model.bin", "custom_checkpoint_0.pkl"],
    "accelerate-fsdp": ["pytorch_model_fsdp_0/.metadata", "optimizer_0/.metadata"],
    "deepspeed-zero2": [
        "global_step3/mp_rank_00_model_states.pt",
        "global_step3/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
    ],
    "megatron": ["common.pt", ".metadata"],
}


@pytest.mark.parametrize("within", [False, True], ids=["all of it", "within"])
@pytest.mark.parametrize(
    ("kind", "file"), [(kind, file) for kind, files in PICKLES.items() for file in files]
)
@pytest.mark.usefixtures("_classes_of_deepspeed")
def test_a_hostile_pickle_runs_nothing(kind: str, file: str, within: bool, tmp_path: Path) -> None:
    import pickle

    made = copied(kind, tmp_path)
    folder = made.parent if kind == "lightning" else made
    path, marker = folder / file, tmp_path / "ran"
    if file.endswith(".metadata"):
        path.write_bytes(pickle.dumps(Hostile(marker)))
    else:
        state = torch.load(path, weights_only=False) if within else None
        torch.save({**state, "evil": Hostile(marker)} if state else Hostile(marker), path)
    shown = r"names .*system, which is not run here|which dc\.RNG does not|a Unknown in place"
    with pytest.raises(CheckpointError, match=shown):
        imported(kind, made, tmp_path / "ours")
    assert not marker.exists()
    assert not (tmp_path / "ours").exists()


class Own:
    """A class of the user's, as in hyper parameters."""


def test_a_class_of_the_users_is_named_and_can_be_left_out(tmp_path: Path) -> None:
    made = copied("lightning", tmp_path)
    state = torch.load(made, weights_only=False)
    state["hyper_parameters"]["loss"] = [Own()]
    torch.save(state, made)
    place = r"hyper_parameters\.loss names .*Own, .*--exclude hyper_parameters\.loss"
    with pytest.raises(IncompatibleError, match=place):
        imports.from_lightning(made, tmp_path / "ours")
    imports.from_lightning(made, tmp_path / "ours", exclude="hyper_parameters.loss")
    found: dict[Any, Any] = {}
    dc.load(found, tmp_path / "ours")
    assert found["hyper_parameters"] == {"where": "a", "width": 5}
    with pytest.raises(ValueError, match="'nothing' matches no name"):
        imports.from_lightning(
            made, tmp_path / "other", exclude=["hyper_parameters.loss", "nothing"]
        )


def test_groups_of_other_sizes_are_refused(tmp_path: Path) -> None:
    imported("accelerate", copied("accelerate", tmp_path), tmp_path / "ours")
    net = Net()
    optimizer = torch.optim.AdamW(p for p in net.parameters() if p.requires_grad)
    with pytest.raises(IncompatibleError, match=r"by number, in groups of \[3, 1\].*\[4\]"):
        dc.load({"model": net, "optim": optimizer}, tmp_path / "ours", include=["model", "optim"])


BROKEN: dict[str, tuple[str, str, type[Exception], str]] = {
    "no file of another rank": (
        "deepspeed-zero2",
        "global_step3/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
        NotFoundError,
        "has 2 partitions, but only 1 of",
    ),
    "no file of the first rank": (
        "deepspeed-zero2",
        "global_step3/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
        NotFoundError,
        "lacks the file of rank 0",
    ),
    "no model of another rank": (
        "deepspeed-zero3",
        "global_step3/zero_pp_rank_1_mp_rank_00_model_states.pt",
        NotFoundError,
        "1 files of the model exist, but 2",
    ),
    "no model": (
        "deepspeed-zero2",
        "global_step3/mp_rank_00_model_states.pt",
        NotFoundError,
        "not a checkpoint of DeepSpeed",
    ),
    "no common values": ("megatron", "common.pt", NotFoundError, r"common\.pt: the file"),
    "no format": ("megatron", "metadata.json", NotFoundError, "not a checkpoint of Megatron"),
    "no part of a model": (
        "accelerate-fsdp",
        "pytorch_model_fsdp_0/.metadata",
        NotFoundError,
        "the file does not exist",
    ),
}


ARCHIVES = [
    ("lightning", "made/a.ckpt"),
    ("accelerate", "made/optimizer.bin"),
    ("accelerate", "made/random_states_0.pkl"),
    ("deepspeed-zero2", "made/global_step3/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"),
    ("deepspeed-zero3", "made/global_step3/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"),
]


@pytest.mark.parametrize(("kind", "file"), ARCHIVES)
def test_a_flipped_bit_in_an_archive_is_named_with_its_record(
    kind: str, file: str, tmp_path: Path
) -> None:
    made = copied(kind, tmp_path)
    path = tmp_path / kind / file
    with zipfile.ZipFile(path) as archive:
        records = [info for info in archive.infolist() if "/data/" in info.filename]
        largest = max(records, key=lambda info: info.file_size)
    data = bytearray(path.read_bytes())
    name_nbytes, extra_nbytes = struct.unpack_from("<2H", data, largest.header_offset + 26)
    data[largest.header_offset + 30 + name_nbytes + extra_nbytes + largest.file_size // 2] ^= 4
    path.write_bytes(data)
    name = largest.filename.partition("/")[2]
    with pytest.raises(CorruptError, match=rf"{file}: its record {name} has the CRC-32"):
        imported(kind, made, tmp_path / "ours")


# What Git leaves in place of a large file.
POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 7\n"


@pytest.mark.parametrize("kind", KINDS)
def test_a_pointer_of_git_lfs_is_named_with_its_remedy(kind: str, tmp_path: Path) -> None:
    made = copied(kind, tmp_path)
    files = [path for path in made.rglob("*") if path.is_file()] or [made]
    is_read = [path for path in files if system(kind) != "accelerate" or path.suffix != ".json"]
    for path in is_read:
        data = path.read_bytes()
        path.write_text(POINTER)
        with pytest.raises(CorruptError, match=r"is a pointer of Git LFS.*`git lfs pull`") as error:
            imports.plan_import(system(kind), made, tmp_path / "ours", {})
        assert f"{path} is" in str(error.value)
        path.write_bytes(data)


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_a_part_of_a_model_that_is_not_there_is_named(
    number: int, suffix: str, tmp_path: Path
) -> None:
    made = copied("accelerate-shards", tmp_path)
    if suffix == "bin":
        for path in [*made.glob("model-*.safetensors")]:
            parts = load_file(path)
            path.unlink()
            torch.save(parts, made / f"pytorch_{path.stem}.bin")
    lost = next(made.glob(f"*model-0000{number}-of-00003.{suffix}"))
    lost.unlink()
    with pytest.raises(NotFoundError, match=f"lacks {lost.name}, of 3 files.*copy it there"):
        imports.from_accelerate(made, tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize("name", BROKEN)
def test_a_file_that_is_not_there_is_named(name: str, tmp_path: Path) -> None:
    kind, file, error, message = BROKEN[name]
    made = copied(kind, tmp_path)
    (made / file).unlink()
    with pytest.raises(error, match=message):
        imported(kind, made, tmp_path / "ours")


STRANGE = {
    "tensor parallelism": ("deepspeed-zero2", "global_step3/mp_rank_01_model_states.pt", "tensor"),
    "pipeline": ("deepspeed-zero2", "global_step3/layer_00-model_states.pt", "pipeline stages"),
    "a rank's shards": ("accelerate-fsdp", "pytorch_model_fsdp_0_rank0.bin", "of one FSDP rank"),
    "anything": ("accelerate", "strange.bin", "move it away"),
}


@pytest.mark.parametrize("name", STRANGE)
def test_what_is_not_read_is_refused_by_name(name: str, tmp_path: Path) -> None:
    kind, file, message = STRANGE[name]
    made = copied(kind, tmp_path)
    (made / file).write_bytes(b"")
    with pytest.raises(IncompatibleError, match=message) as error:
        imported(kind, made, tmp_path / "ours")
    assert str(made) in str(error.value)


@pytest.fixture
def _classes_of_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in for the classes that its files name, so that torch can change them."""
    for path, names in {
        "deepspeed.runtime.fp16.loss_scaler": ["LossScaler"],
        "deepspeed.utils.tensor_fragment": ["fragment_address"],
        "deepspeed.runtime.zero.config": ["ZeroStageEnum"],
    }.items():
        parts = path.split(".")
        for depth in range(1, len(parts) + 1):
            name = ".".join(parts[:depth])
            monkeypatch.setitem(sys.modules, name, sys.modules.get(name) or ModuleType(name))
        for name in names:
            made = type(name, (int,) if name == "ZeroStageEnum" else (), {"__module__": path})
            setattr(sys.modules[path], name, made)


@pytest.mark.usefixtures("_classes_of_deepspeed")
def test_a_vector_that_is_too_short_is_damage(tmp_path: Path) -> None:
    made = copied("deepspeed-zero2", tmp_path)
    path = made / "global_step3" / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    state = torch.load(path, weights_only=False)
    vectors = state["optimizer_state_dict"]["single_partition_of_fp32_groups"]
    vectors[1] = vectors[1][:-4].clone()
    torch.save(state, path)
    with pytest.raises(CorruptError, match="the files do not form one state"):
        imported("deepspeed-zero2", made, tmp_path / "ours")


STAGE2 = "mp_rank_00_model_states.pt", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"


def _partition(**changes: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda state: {
        **state,
        "optimizer_state_dict": {**state["optimizer_state_dict"], **changes},
    }


def _with_number(state: dict[str, Any], key: str) -> Any:
    """Replace the names of parameters by numbers."""
    names = state[key][0] if key == "param_shapes" else state[key]
    numbered = {number or 7: names[name] for number, name in enumerate(names)}
    return {**state, key: [numbered] if key == "param_shapes" else numbered}


CRAFTED: dict[str, tuple[int, Callable[[dict[str, Any]], Any], str]] = {
    "a stage that is text": (1, _partition(zero_stage="two"), "zero_stage is 'two'"),
    "a stage beyond 3": (1, _partition(zero_stage=4), "zero_stage is 4"),
    "counts of text": (1, _partition(partition_count=[1, "a"]), "partition_count is not a number"),
    "a count of text": (1, _partition(partition_count="2"), "partition_count is not a number"),
    "a padding of text": (1, _partition(param_alignment_paddings=[["1"] * 9] * 2), "its paddings"),
    "a number for a name": (
        0,
        lambda s: _with_number(s, "param_shapes"),
        "a int in place of a str",
    ),
    "a number in the module": (0, lambda s: _with_number(s, "module"), "a int in place of a str"),
    "tied to nothing": (
        0,
        lambda s: {**s, "shared_params": {"out.weight": "lost"}},
        r"model\.out\.weight is tied to model\.lost, which the files lack",
    ),
}


@pytest.mark.usefixtures("_classes_of_deepspeed")
@pytest.mark.parametrize("name", CRAFTED)
def test_damage_in_a_folder_of_deepspeed_is_named(name: str, tmp_path: Path) -> None:
    number, change, message = CRAFTED[name]
    made = copied("deepspeed-zero2", tmp_path)
    path = made / "global_step3" / STAGE2[number]
    torch.save(change(torch.load(path, weights_only=False)), path)
    with pytest.raises(CorruptError, match=message) as error:
        imports.plan_import("deepspeed", made, tmp_path / "ours", {})
    assert str(path.parent) in str(error.value)


def test_a_weight_that_no_file_has_is_named(tmp_path: Path) -> None:
    made = copied("deepspeed-zero3", tmp_path)
    path = made / "global_step3" / "zero_pp_rank_0_mp_rank_00_model_states.pt"
    state = torch.load(path, weights_only=False)
    state["shared_params"] = {}
    torch.save(state, path)
    with pytest.raises(IncompatibleError, match=r"out\.weight.*--exclude model\.out\.weight"):
        imports.from_deepspeed(made, tmp_path / "ours")
    imports.from_deepspeed(made, tmp_path / "ours", exclude="model.out.weight")


@pytest.mark.usefixtures("_classes_of_deepspeed")
@pytest.mark.parametrize("kind", ["deepspeed-zero2", "deepspeed-zero3"])
def test_a_parameter_without_elements_is_one_all_the_same(kind: str, tmp_path: Path) -> None:
    made = copied(kind, tmp_path)
    for path in (made / "global_step3").glob("*model_states.pt"):
        state = torch.load(path, weights_only=False)
        state["param_shapes"][0]["none"] = torch.Size([0, 3])
        torch.save(state, path)
    for path in (made / "global_step3").glob("*optim_states.pt"):
        state = torch.load(path, weights_only=False)
        if paddings := state["optimizer_state_dict"].get("param_alignment_paddings"):
            paddings[0].append(0)
        torch.save(state, path)
    imports.from_deepspeed(made, tmp_path / "ours", world_size=2)
    with dc.open(tmp_path / "ours") as found:
        for name in ("model.none", "optim.state.model.none.exp_avg"):
            assert (found.tensors[name].dtype, found.tensors[name].shape) == ("float32", (0, 3))


def test_what_is_tied_is_left_out_as_one(tmp_path: Path) -> None:
    made = copied("deepspeed-zero2", tmp_path)
    with pytest.raises(ValueError, match=r"model\.out\.weight is tied to model\.inner\.weight"):
        imports.from_deepspeed(made, tmp_path / "ours", exclude="model.inner.weight")
    imports.from_deepspeed(made, tmp_path / "ours", exclude=["model.inner.weight", "*out.weight"])


def test_buffers_of_megatrons_optimizer_are_refused(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    made = copied("megatron", tmp_path)
    name = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_bf16.bucket_idx_0.exp_avg"
    with pytest.warns():
        dcp.save({name: torch.ones(4), "w": torch.ones(2)}, checkpoint_id=made)
    with pytest.raises(IncompatibleError, match=r"fully-reshardable, or .*--exclude optim"):
        imports.from_megatron(made, tmp_path / "ours")
    imports.from_megatron(made, tmp_path / "ours", exclude="optim")
    with dc.open(tmp_path / "ours") as found:
        assert [*found.tensors] == ["model.w"]


def test_a_dcp_folder_of_single_ranks_is_named(tmp_path: Path) -> None:
    (tmp_path / "__0.metadata").write_bytes(b"")
    for call in (lambda: imports.from_dcp(tmp_path, tmp_path / "x"), lambda: dc.load({}, tmp_path)):
        with pytest.raises(NotFoundError, match="metadata of single ranks"):
            call()


def test_a_file_of_another_system_is_told_apart(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1)}, tmp_path / "a.ckpt")
    with pytest.raises(IncompatibleError, match="--from torch"):
        imports.from_lightning(tmp_path / "a.ckpt", tmp_path / "ours")
    for call in (imports.from_accelerate, imports.from_deepspeed, imports.from_megatron):
        with pytest.raises(NotFoundError, match=str(tmp_path)):
            call(tmp_path / "nothing", tmp_path / "ours")
        (tmp_path / "empty").mkdir(exist_ok=True)
        with pytest.raises(NotFoundError, match=str(tmp_path)):
            call(tmp_path / "empty", tmp_path / "ours")


# --- back to the frameworks ----------------------------------------------------------------------


def same(found: Any, expected: Any) -> bool:
    """Compare nested contents, tensors bit for bit; the order of keys does not count."""
    if type(found) is not type(expected):
        return False
    if isinstance(found, dict):
        keys_agree = found.keys() == expected.keys()
        return keys_agree and all(same(found[key], expected[key]) for key in found)
    if isinstance(found, list | tuple):
        return len(found) == len(expected) and all(map(same, found, expected))
    if torch.is_tensor(found):
        return found.dtype == expected.dtype and torch.equal(found, expected)
    return bool(found == expected)


def test_an_import_of_lightning_is_exported_as_the_same_file(tmp_path: Path) -> None:
    made = source("lightning", GOLDEN / "lightning")
    imports.from_lightning(made, tmp_path / "ours", world_size=3)
    write_files.export_lightning(tmp_path / "ours", tmp_path / "back.ckpt")
    expected, found = (
        torch.load(file, weights_only=False) for file in (made, tmp_path / "back.ckpt")
    )
    assert same(found, expected)
    assert [*found["optimizer_states"][0]["state"]] == [*expected["optimizer_states"][0]["state"]]
    write_files.export_lightning(
        tmp_path / "ours", tmp_path / "part.ckpt", exclude=["optim", "hyper_parameters"]
    )
    left_out = torch.load(tmp_path / "part.ckpt", weights_only=False)
    assert expected.keys() - left_out.keys() == {"optimizer_states", "hyper_parameters"}


def test_parameters_of_an_optimizer_get_the_numbers_of_its_state_dict() -> None:
    groups = [{"params": ["model.a", "model.b"], "lr": 1}, {"params": ["model.c"]}]
    state = {"model.c": {"x": 3}, "model.a": {"x": 1}}
    assert write_files.number_params({"state": state, "param_groups": groups}) == {
        "state": {2: {"x": 3}, 0: {"x": 1}},
        "param_groups": [{"params": [0, 1], "lr": 1}, {"params": [2]}],
    }


@pytest.mark.parametrize("kind", ["accelerate", "accelerate-bin", "accelerate-ranks"])
def test_an_import_of_accelerate_is_exported_as_the_same_files(kind: str, tmp_path: Path) -> None:
    made = source(kind, GOLDEN / kind)
    imports.from_accelerate(made, tmp_path / "ours", world_size=2)
    write_files.export_accelerate(tmp_path / "ours", tmp_path / "back")
    names = {path.name for path in (tmp_path / "back").iterdir()}
    assert {"pytorch_model.bin", "optimizer.bin", "scheduler.bin"} <= names
    for name in names:
        found = torch.load(tmp_path / "back" / name)
        if (made / name).exists():
            assert same(found, torch.load(made / name, weights_only=False)), name
        else:
            file = made / name.replace("pytorch_model", "model").replace(".bin", ".safetensors")
            assert same(found, load_file(file)), name
    with pytest.raises(ExistsError):
        write_files.export_accelerate(tmp_path / "ours", tmp_path / "back")


class Plain:
    """A scheduler, or another object, whose state is a plain value."""

    def __init__(self, value: int) -> None:
        self.value = value

    def state_dict(self) -> dict[str, int]:
        return {"0": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["0"]


def test_each_of_several_objects_of_accelerate_has_its_file(tmp_path: Path) -> None:
    weights = [{"0": torch.ones(2)}, {"0": torch.zeros(2)}]
    objects = [Plain(3), Plain(4)]
    both: dict[str, Any] = {"model": weights, "scheduler": objects, "custom": objects}
    one = {name: first for name, (first, _) in both.items()}
    two = {name: dict(zip("01", values, strict=True)) for name, values in both.items()}
    expected = {
        "pytorch_model.bin": weights[0],
        "scheduler.bin": {"0": 3},
        "custom_checkpoint_0.pkl": {"0": 3},
    }
    more = {
        "pytorch_model_1.bin": weights[1],
        "scheduler_1.bin": {"0": 4},
        "custom_checkpoint_1.pkl": {"0": 4},
    }
    for number, (objects_by_name, files) in enumerate([(one, expected), (two, expected | more)]):
        folder = tmp_path / f"{number}"
        dc.save({**objects_by_name, "position": 1, "rng": 2}, folder / "ours")
        write_files.export_accelerate(folder / "ours", folder / "back")
        found = {path.name: torch.load(path) for path in (folder / "back").iterdir()}
        assert same(found, files)


def test_what_a_framework_did_not_save_is_no_file_of_it(tmp_path: Path) -> None:
    dc.save({"model": torch.nn.Linear(2, 2), "optim": {}}, tmp_path / "ours")
    for export in (write_files.export_lightning, write_files.export_accelerate):
        with pytest.raises(IncompatibleError, match=r"neither .* For the weights, export"):
            export(tmp_path / "ours", tmp_path / "new")
        assert not (tmp_path / "new").exists()


# --- which format it is --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_format_of_a_framework_is_found_by_its_files(kind: str) -> None:
    assert imports.detect_format(source(kind, GOLDEN / kind)) == system(kind)


def test_the_format_of_a_file_is_found_by_its_contents(tmp_path: Path) -> None:
    weights = {"w": torch.ones(2)}
    shutil.copy(source("lightning", GOLDEN / "lightning"), tmp_path / "renamed.pt")
    torch.save(weights, tmp_path / "plain.ckpt")
    save_file(weights, tmp_path / "a.safetensors")
    (tmp_path / "hf").mkdir()
    save_file(weights, tmp_path / "hf" / "model.safetensors")
    (tmp_path / "a.shrew").write_bytes(b"SHRW" + bytes(60))
    formats = {"renamed.pt": "lightning", "plain.ckpt": "torch", "a.safetensors": "hf", "hf": "hf"}
    for name, expected in {**formats, "a.shrew": "shrew"}.items():
        assert imports.detect_format(tmp_path / name) == expected


def test_what_has_no_format_is_refused_with_the_way_on(tmp_path: Path) -> None:
    dc.save({"x": 1}, tmp_path / "run" / "step-1", step=1)
    (tmp_path / "empty").mkdir()
    (tmp_path / "text").write_text("a text")
    for name in ("empty", "text", "run"):
        with pytest.raises(IncompatibleError, match=r"no known format: .* --from: dcp, torch, li"):
            imports.detect_format(tmp_path / name)
    with pytest.raises(IncompatibleError, match=r"needs no import: dc\.load reads it"):
        imports.detect_format(tmp_path / "run" / "step-1")
    with pytest.raises(NotFoundError, match="does not exist"):
        imports.detect_format(tmp_path / "nothing")
    (tmp_path / "empty" / ".metadata").touch()
    save_file({"w": torch.ones(2)}, tmp_path / "empty" / "model.safetensors")
    with pytest.raises(IncompatibleError, match=r"of DCP, and .* --from: dcp, or hf"):
        imports.detect_format(tmp_path / "empty")


def test_what_is_left_out_of_an_export_leaves_a_file_that_loads(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    state = {"model": model, "optim": optimizer, "position": {"step": 1}}
    dc.save(state, tmp_path / "loop")
    dc.save({**state, "trainer": {"epoch": 2}}, tmp_path / "fit")

    write_files.export_accelerate(tmp_path / "loop", tmp_path / "a", exclude="optim.state.*")
    write_files.export_lightning(tmp_path / "fit", tmp_path / "b.ckpt", exclude="optim.state.*")
    states = [torch.load(tmp_path / "a" / "optimizer.bin")]
    states += torch.load(tmp_path / "b.ckpt")["optimizer_states"]
    expected = torch.optim.AdamW(model.parameters()).state_dict()
    for found in states:
        assert found == expected
        optimizer.load_state_dict(found)  # without state, as a new one

    write_files.export_accelerate(tmp_path / "loop", tmp_path / "c", exclude="optim")
    write_files.export_lightning(tmp_path / "fit", tmp_path / "d.ckpt", exclude="optim")
    assert [path.name for path in (tmp_path / "c").iterdir()] == ["pytorch_model.bin"]
    assert torch.load(tmp_path / "d.ckpt").keys() == {"epoch", "state_dict"}
    with pytest.raises(ValueError, match="leaves nothing"):
        write_files.export_accelerate(tmp_path / "loop", tmp_path / "e", exclude=["optim", "model"])


def test_a_file_that_cannot_be_opened_has_no_unknown_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(dc.CorruptError, match="regular file"):
        imports.detect_format(tmp_path / "pipe")
    (tmp_path / "mine.pt").write_text("a text")
    error = StorageError("mine.pt: Permission denied")
    refused = FaultyStorage(LocalStorage(), fail_at_call=1, error=error, sticky=True)
    monkeypatch.setattr(imports, "open_storage", lambda path: (refused, str(path)))
    with pytest.raises(StorageError, match=r"mine\.pt: Permission denied"):
        imports.detect_format(tmp_path / "mine.pt")
