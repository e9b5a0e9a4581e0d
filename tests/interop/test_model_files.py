"""Which files of a folder are one model: indexes, numbers, variants, and parts of tensors."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import dist_ckpt as dc
from dist_ckpt.errors import CheckpointError, CorruptError, IncompatibleError, NotFoundError
from dist_ckpt.interop import imports
from ranks import run_ranks

Tensors = Mapping[str, torch.Tensor]


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {
        "w": torch.randn(7, 4),
        "deep.b": torch.randn(3).bfloat16(),
        "n": torch.tensor(3),
        "none": torch.empty(0, 4),
    }


def write(folder: Path, name: str, content: Tensors, suffix: str = ".safetensors") -> None:
    folder.mkdir(exist_ok=True)
    (torch.save if suffix == ".bin" else save_file)(dict(content), folder / f"{name}{suffix}")


def write_index(folder: Path, name: str, files: Mapping[str, Tensors]) -> None:
    weights = {key: file for file, content in files.items() for key in content}
    (folder / name).write_text(json.dumps({"metadata": {}, "weight_map": weights}))


def loaded(path: Path) -> dict[str, torch.Tensor]:
    state: dict[str, Any] = {}
    dc.load(state, path)
    assert state.keys() == {"model"}
    return dict(state["model"])


def same(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape)
        assert torch.equal(found[name], value)


def halves(content: Tensors) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    items = [*content.items()]
    return dict(items[::2]), dict(items[1::2])


# --- names -------------------------------------------------------------------------------------

# The names of a model in two files: its index, and the files.
SPLIT = {
    "transformers": ("model.safetensors.index.json", "model-0000{}-of-00002.safetensors"),
    "a variant": ("model.safetensors.index.fp16.json", "model-0000{}-of-00002.fp16.safetensors"),
    "another": (
        "diffusion_pytorch_model.safetensors.index.non_ema.json",
        "diffusion_pytorch_model.non_ema-0000{}-of-00002.safetensors",
    ),
    "one more": (
        "diffusion_pytorch_model.fp16.safetensors.index.json",
        "diffusion_pytorch_model.fp16-0000{}-of-00002.safetensors",
    ),
}


@pytest.mark.parametrize("has_index", [True, False])
@pytest.mark.parametrize("kind", SPLIT)
def test_a_model_in_several_files_is_one_state(tmp_path: Path, kind: str, has_index: bool) -> None:
    index, pattern = SPLIT[kind]
    files = {pattern.format(n): part for n, part in enumerate(halves(tensors()), 1)}
    for name, part in files.items():
        write(tmp_path / "m", name.removesuffix(".safetensors"), part)
    if has_index:
        write_index(tmp_path / "m", index, files)
        same(loaded(tmp_path / "m" / index), tensors())
    same(loaded(tmp_path / "m"), tensors())
    imports.from_hf(tmp_path / "m", tmp_path / "ours")
    same(loaded(tmp_path / "ours"), tensors())
    (tmp_path / "m" / [*files][1]).unlink()
    with pytest.raises(NotFoundError, match="00002-of-00002"):
        dc.load({}, tmp_path / "m")


@pytest.mark.parametrize(
    ("numbers", "total", "text"),
    [
        ((1, 7), 2, "lacks model-00002-of-00002.safetensors, of 2"),
        ((2,), 9999999999, "lacks model-00001-of-9999999999.safetensors, .* 9999999995 more"),
    ],
)
def test_missing_numbers_are_few_names(
    tmp_path: Path, numbers: tuple[int, ...], total: int, text: str
) -> None:
    for number in numbers:
        write(tmp_path / "m", f"model-{number:05d}-of-{total:05d}", tensors())
    with pytest.raises(NotFoundError, match=text):
        dc.load({}, tmp_path / "m")


@pytest.mark.parametrize(
    "name", ["adapter_model", "diffusion_pytorch_model", "pytorch_model", "model.fp16", "lora"]
)
def test_a_folder_with_one_file_needs_no_known_name(tmp_path: Path, name: str) -> None:
    write(tmp_path / "m", name, tensors())
    same(loaded(tmp_path / "m"), tensors())


def test_the_model_without_a_variant_is_taken_as_its_library_does(tmp_path: Path) -> None:
    name = "diffusion_pytorch_model"
    for number, variant in enumerate(["", ".fp16", ".non_ema"]):
        write(tmp_path / "m", f"{name}{variant}", tensors(number))
    write(tmp_path / "m", "adapter_model", tensors(4))
    same(loaded(tmp_path / "m"), tensors(0))
    same(loaded(tmp_path / "m" / f"{name}.fp16.safetensors"), tensors(1))
    (tmp_path / "m" / f"{name}.safetensors").unlink()
    (tmp_path / "m" / "adapter_model.safetensors").unlink()
    with pytest.raises(
        IncompatibleError, match=rf"2 models: give .*{name}\.fp16\.safetensors.*non_ema"
    ):
        dc.load({}, tmp_path / "m")


def test_files_of_two_numberings_are_refused(tmp_path: Path) -> None:
    for number, name in enumerate(["00001-of-00002", "00002-of-00002", "00001-of-00001"]):
        write(tmp_path / "m", f"model-{name}", {f"w{number}": torch.ones(1)})
    with pytest.raises(IncompatibleError, match=r"files of several saves: .*00001-of-00001"):
        dc.load({}, tmp_path / "m")


def test_a_tensor_in_two_files_without_an_index_is_refused(tmp_path: Path) -> None:
    for number in (1, 2):
        write(tmp_path / "m", f"model-0000{number}-of-00002", {"w": torch.ones(2) * number})
    with pytest.raises(IncompatibleError, match=r"w in model-00001-of.*overlap"):
        dc.load({}, tmp_path / "m")


def test_a_pipeline_of_diffusers_names_its_models(tmp_path: Path) -> None:
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "model_index.json").write_text("{}")
    for name in ("unet", "vae"):
        write(tmp_path / "p" / name, "diffusion_pytorch_model.fp16", tensors())
        (tmp_path / "p" / name / "config.json").write_text("{}")
    (tmp_path / "p" / "scheduler").mkdir()
    with pytest.raises(IncompatibleError, match=r"give the folder of one: \S+/p/unet, \S+/p/vae$"):
        dc.load({}, tmp_path / "p")
    same(loaded(tmp_path / "p" / "vae"), tensors())


def test_the_folder_of_an_attempt_is_not_taken_for_one_of_hugging_face(tmp_path: Path) -> None:
    dc.save({"model": {"w": torch.ones(1)}}, tmp_path / "a")
    (attempt,) = (tmp_path / "a").iterdir()
    with pytest.raises(NotFoundError, match="Pass the folder that was given to save"):
        dc.load({}, attempt)


def test_a_gguf_file_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF\3\0\0\0" + bytes(64))
    with pytest.raises(IncompatibleError, match=r"a GGUF file.*gguf_file="):
        dc.load({}, tmp_path / "a.gguf")
    with pytest.raises(IncompatibleError, match="a GGUF file"):
        imports.from_hf(tmp_path / "a.gguf", tmp_path / "ours")


# --- files of torch.save -----------------------------------------------------------------------


@pytest.mark.parametrize("has_index", [True, False])
@pytest.mark.parametrize("variant", ["", ".fp16"])
def test_the_files_of_a_bin_index_are_imported_as_one_model(
    tmp_path: Path, variant: str, has_index: bool
) -> None:
    files = {
        f"pytorch_model-0000{n}-of-00002{variant}.bin": part
        for n, part in enumerate(halves(tensors()), 1)
    }
    for name, part in files.items():
        write(tmp_path / "m", name.removesuffix(".bin"), part, ".bin")
    torch.save({"lr": 1}, tmp_path / "m" / "training_args.bin")
    index = f"pytorch_model.bin.index{variant}.json"
    paths = [tmp_path / "m"]
    if has_index:
        write_index(tmp_path / "m", index, files)
        paths.append(tmp_path / "m" / index)
    for number, path in enumerate(paths):
        with pytest.raises(IncompatibleError, match="import --from torch"):
            dc.load({}, path)
        assert imports.detect_format(path) == "torch"
        imports.from_torch(path, tmp_path / f"{number}")
        same(loaded(tmp_path / f"{number}"), tensors())
        imports.from_torch(path, tmp_path / f"{number}b", include="model.w")
        assert [*loaded(tmp_path / f"{number}b")] == ["w"]
    (tmp_path / "m" / [*files][1]).unlink()
    with pytest.raises(NotFoundError):
        imports.from_torch(paths[0], tmp_path / "ours")


def test_a_bin_file_that_lacks_a_name_of_its_index_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "m", "pytorch_model-00001-of-00001", tensors(), ".bin")
    files = {"pytorch_model-00001-of-00001.bin": {"w": torch.ones(1)}}
    write_index(tmp_path / "m", "pytorch_model.bin.index.json", files)
    imports.from_torch(tmp_path / "m", tmp_path / "w")
    assert [*loaded(tmp_path / "w")] == ["w"]  # the file has others, too
    files = {"pytorch_model-00001-of-00001.bin": {**tensors(), "more": torch.ones(1)}}
    write_index(tmp_path / "m", "pytorch_model.bin.index.json", files)
    with pytest.raises(CorruptError, match="lacks tensors that the index names for it: more"):
        imports.from_torch(tmp_path / "m", tmp_path / "ours")


@pytest.mark.parametrize("name", ["pytorch_model", "adapter_model", "diffusion_pytorch_model"])
def test_one_bin_file_in_a_folder_is_imported(tmp_path: Path, name: str) -> None:
    state = torch.nn.BatchNorm1d(2).state_dict()
    (tmp_path / "m").mkdir()
    torch.save(state, tmp_path / "m" / f"{name}.bin")
    with pytest.raises(IncompatibleError, match="import --from torch"):
        dc.load({}, tmp_path / "m")
    imports.from_torch(tmp_path / "m", tmp_path / "ours")
    found: dict[str, Any] = {}
    dc.load(found, tmp_path / "ours")
    same(found["model"], state)
    assert found["model"]._metadata == state._metadata  # type: ignore[attr-defined]


# --- parts of tensors --------------------------------------------------------------------------


def shard(
    folder: Path, rank: int, parts: Mapping[str, tuple[tuple[int, ...], torch.Tensor]]
) -> Path:
    """Write a file as `HuggingFaceStorageWriter(save_distributed=True)` does on a rank."""
    folder.mkdir(exist_ok=True)
    info = {name: {"saved_offsets": list(offset)} for name, (offset, _) in parts.items()}
    path = folder / f"shard-{rank:05}-model-00001-of-00001.safetensors"
    metadata = {"DCP_SHARDING_INFO": json.dumps(info), "DCP_VERSION": "1.0", "format": "pt"}
    content = {name: value.contiguous() for name, (_, value) in parts.items()}
    save_file(content, path, metadata=metadata)
    return path


def shards(folder: Path, num_ranks: int = 3) -> list[Path]:
    content = tensors()
    rows = -(-7 // num_ranks)
    paths = []
    for rank in range(num_ranks):
        start = rank * rows
        parts: dict[str, tuple[tuple[int, ...], torch.Tensor]] = {
            "w": ((start, 0), content["w"][start : start + rows])
        }
        if not rank:
            parts |= {name: ((0,) * content[name].ndim, content[name]) for name in content} | parts
        paths.append(shard(folder, rank + 1, parts))
    return paths


def test_parts_of_tensors_are_read_as_whole_ones(tmp_path: Path) -> None:
    paths = shards(tmp_path / "m")
    same(loaded(tmp_path / "m"), tensors())
    imports.from_hf(tmp_path / "m", tmp_path / "ours", world_size=2)
    same(loaded(tmp_path / "ours"), tensors())
    for path in paths:  # nothing has number 1, as with a `fqn_to_index_mapping`
        path.rename(str(path).replace("00001-of-00001", "00002-of-00002"))
    same(loaded(tmp_path / "m"), tensors())


def test_parts_in_two_dimensions_are_read_as_whole_ones(tmp_path: Path) -> None:
    whole = torch.arange(35.0).reshape(5, 7)
    for rank, (row, column) in enumerate([(0, 0), (0, 4), (3, 0), (3, 4)], 1):
        part = whole[row : 3 if row == 0 else 5, column : 4 if column == 0 else 7]
        shard(tmp_path / "m", rank, {"w": ((row, column), part)})
    same(loaded(tmp_path / "m"), {"w": whole})


def test_one_part_is_never_taken_as_the_whole(tmp_path: Path) -> None:
    for path in shards(tmp_path / "m"):
        with pytest.raises(
            IncompatibleError, match=rf"parts of tensors.*their folder, {tmp_path}/m"
        ):
            dc.load({}, path)
        renamed = tmp_path / "model.safetensors"
        shutil.copy(path, renamed)
        if "shard-00001" not in path.name:  # that begins as a whole one does
            with pytest.raises(IncompatibleError, match="parts of tensors"):
                dc.load({}, renamed)
            with pytest.raises(IncompatibleError, match="parts of tensors"):
                dc.load({}, tmp_path, include="model.w")


def test_a_missing_part_is_named_by_its_tensor(tmp_path: Path) -> None:
    paths = shards(tmp_path / "m")
    paths[1].unlink()
    with pytest.raises(NotFoundError, match=r"only 16 of the 28 elements of w: copy"):
        dc.load({}, tmp_path / "m")
    # The files do not say where the last part ends: the state's shape does.
    paths = shards(tmp_path / "m")
    paths[-1].unlink()
    with pytest.raises(IncompatibleError, match="shape"):
        dc.load({"model": {"w": torch.zeros(7, 4)}}, tmp_path / "m", include="model.w")


def test_parts_of_two_saves_are_refused(tmp_path: Path) -> None:
    shards(tmp_path / "m")
    shard(tmp_path / "m", 9, {"w": ((3, 0), torch.zeros(3, 4))})
    with pytest.raises(
        IncompatibleError, match=r"w in shard.*overlap .*files are of several saves"
    ):
        dc.load({}, tmp_path / "m")
    shard(tmp_path / "m", 9, {"w": ((7, 0), torch.zeros(3, 4).half())})
    with pytest.raises(IncompatibleError, match="parts of w with other dtypes"):
        dc.load({}, tmp_path / "m")


def test_an_index_over_parts_is_refused(tmp_path: Path) -> None:
    path = shard(tmp_path / "m", 1, {"w": ((2, 0), torch.ones(2, 4))})
    path.rename(tmp_path / "m" / "model-00001-of-00001.safetensors")
    write_index(
        tmp_path / "m",
        "model.safetensors.index.json",
        {"model-00001-of-00001.safetensors": {"w": torch.ones(1)}},
    )
    with pytest.raises(IncompatibleError, match=r"only a part of w: .*save_distributed=True"):
        dc.load({}, tmp_path / "m")


@pytest.mark.parametrize(
    "info",
    [
        "{}",
        "[]",
        "{",
        '{"w": {"saved_offsets": [0]}}',
        '{"w": {"saved_offsets": [-1, 0]}}',
        '{"w": {"saved_offsets": [0, "a"]}}',
        '{"w": {"saved_offsets": [9223372036854775807, 0]}}',
        '{"w": 5}',
    ],
)
def test_a_lie_about_parts_is_refused(tmp_path: Path, info: str) -> None:
    (tmp_path / "m").mkdir()
    path = tmp_path / "m" / "shard-00001-model-00001-of-00001.safetensors"
    save_file({"w": torch.ones(2, 2)}, path, metadata={"DCP_SHARDING_INFO": info})
    for source in (tmp_path / "m", path):
        with pytest.raises(CheckpointError, match=str(tmp_path)):
            dc.load({}, source)


def save_for_hugging_face(rank: int, path: str, consolidates: bool) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2))
    state = {
        "w": distribute_tensor(tensors()["w"], mesh, [Shard(0), Shard(1)]),
        "r": distribute_tensor(tensors()["w"], mesh, [Replicate(), Shard(0)]),
        "plain": tensors()["deep.b"],
    }
    writer = dcp.HuggingFaceStorageWriter(
        path, save_distributed=True, enable_consolidation=consolidates
    )
    dcp.save(state, storage_writer=writer)


@pytest.mark.multi_process
@pytest.mark.parametrize("consolidates", [False, True])
def test_what_dcps_writer_leaves_is_read_whole(tmp_path: Path, consolidates: bool) -> None:
    path = tmp_path / "m"
    path.mkdir()
    run_ranks(save_for_hugging_face, str(path), consolidates, world_size=4)
    expected = {"w": tensors()["w"], "r": tensors()["w"], "plain": tensors()["deep.b"]}
    same(loaded(path / "sharded" if consolidates else path), expected)
    if consolidates:
        (file,) = path.glob("*.safetensors")
        same(loaded(path), load_file(file))
        same(loaded(file), expected)
