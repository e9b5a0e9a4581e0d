"""Exports as folders of safetensors files: every value, whole or not at all, what not by name."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import dist_ckpt as dc
from dist_ckpt.core.checkpoint.open_checkpoint import OpenCheckpoint
from dist_ckpt.core.storage import open_storage
from dist_ckpt.errors import CorruptError, ExistsError, IncompatibleError, NotFoundError
from dist_ckpt.interop.hf import export
from dist_ckpt.interop.hf.export import parse_size
from dist_ckpt.testing.faulty_storage import FaultyStorage
from dist_ckpt.tools import new_files
from subclass_tensors import Quantized

INDEX = "model.safetensors.index.json"


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    return {
        "embed.weight": torch.randn(33, 5),
        "half": torch.randn(7, 3).to(torch.bfloat16),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "none": torch.zeros(0, 4),
        "mask": torch.tensor([True, False, True]),
        "count": torch.arange(11),
    }


def saved(root: Path, state: dict[str, Any], world_size: int = 1) -> Path:
    dc.save(state, root / "one", step=4)
    if world_size == 1:
        return root / "one"
    dc.reshard(root / "one", root / "many", world_size=world_size)
    return root / "many"


def read(folder: Path) -> dict[str, torch.Tensor]:
    """Read a folder with the library that others read it with; each name is in one file."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            assert file.metadata()["format"] == "pt"
            for name in file.keys():  # noqa: SIM118 - it is no dict
                assert name not in found
                found[name] = file.get_tensor(name)
    return found


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(found[name], tensor), name


# --- what is written ---------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 3])
def test_every_tensor_comes_as_it_was_however_it_was_cut(tmp_path: Path, world_size: int) -> None:
    state = {"model": tensors(), "optim": {"m": torch.ones(3)}, "step": 7}
    source = saved(tmp_path, state, world_size)
    nbytes = export.export_folder(source, tmp_path / "hf", max_shard_size=100)
    assert_same(read(tmp_path / "hf"), tensors())
    files = sorted(os.listdir(tmp_path / "hf"))
    assert files == [*(f"model-{n:05}-of-00003.safetensors" for n in (1, 2, 3)), INDEX]
    assert nbytes == sum((tmp_path / "hf" / name).stat().st_size for name in files)
    index = json.loads((tmp_path / "hf" / INDEX).read_text())
    assert index["metadata"] == {"total_size": sum(one.nbytes for one in tensors().values())}
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / "hf" / file, "pt") as held:
            assert name in held.keys()  # noqa: SIM118 - it is no dict
    # The first is larger than a file may be, and so is alone in its own.
    assert [n for n, f in index["weight_map"].items() if f.startswith("model-00001")] == [
        "embed.weight"
    ]
    live: dict[str, Any] = {}
    dc.load(live, tmp_path / "hf")
    assert_same(live["model"], tensors())


def test_a_model_that_fits_into_one_file_has_no_index(tmp_path: Path) -> None:
    source = saved(tmp_path, {"model": tensors()}, 2)
    export.export_folder(source, tmp_path / "hf")
    assert os.listdir(tmp_path / "hf") == ["model.safetensors"]
    assert_same(read(tmp_path / "hf"), tensors())


def test_a_tensor_of_many_windows_comes_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "WINDOW_NBYTES", 64)
    state = {**tensors(), "deep": torch.randn(3, 5, 7, 2)}
    source = saved(tmp_path, {"model": state}, 3)
    told: list[tuple[int, int]] = []
    export.export_folder(source, tmp_path / "a", progress=lambda *args: told.append(args))
    assert_same(read(tmp_path / "a"), state)
    total = sum(one.nbytes for one in state.values())
    assert told[-1] == (total, total)
    assert len(told) > 20
    export.export_folder(source, tmp_path / "b", dtype="fp16")
    halves = {name: t.half() if t.is_floating_point() else t for name, t in state.items()}
    assert_same(read(tmp_path / "b"), halves)


class Tied(torch.nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.wte = torch.nn.Embedding(5, 3)
        self.head = torch.nn.Linear(3, 5, bias=False)
        self.head.weight = self.wte.weight


def test_tied_weights_are_written_once_and_fill_both(tmp_path: Path) -> None:
    model, live = Tied(), Tied(1)
    export.export_folder(saved(tmp_path, {"model": model}), tmp_path / "hf")
    assert_same(read(tmp_path / "hf"), {"wte.weight": model.wte.weight.detach()})
    dc.load({"model": live}, tmp_path / "hf")
    assert torch.equal(live.head.weight, model.wte.weight)
    assert live.head.weight is live.wte.weight


def test_what_is_tied_to_what_is_left_out_has_its_data_all_the_same(tmp_path: Path) -> None:
    one = torch.ones(3)
    source = saved(tmp_path, {"model": {"a": one, "b": one}, "ema": {"c": one}})
    export.export_folder(source, tmp_path / "ema", only="ema")
    assert_same(read(tmp_path / "ema"), {"c": one})
    export.export_folder(source, tmp_path / "b", exclude="model.a")
    assert_same(read(tmp_path / "b"), {"b": one})


def test_floating_tensors_alone_are_converted(tmp_path: Path) -> None:
    source = saved(tmp_path, {"model": tensors()}, 2)
    dtypes: list[str | torch.dtype] = ["bf16", "bfloat16", torch.bfloat16]
    for number, dtype in enumerate(dtypes):
        export.export_folder(source, tmp_path / f"{number}", dtype=dtype)
        found = read(tmp_path / f"{number}")
        assert_same(
            found, {n: t.bfloat16() if t.is_floating_point() else t for n, t in tensors().items()}
        )


def test_what_was_infinite_may_stay_so_and_what_would_become_so_is_refused(tmp_path: Path) -> None:
    values = torch.tensor([1.0, float("inf"), float("nan")])
    source = saved(tmp_path, {"model": {"w": values}})
    export.export_folder(source, tmp_path / "hf", dtype="fp16")
    assert read(tmp_path / "hf")["w"].tolist()[:2] == [1.0, float("inf")]
    many = torch.ones(100_000)
    many[70_000] = float("nan")
    many[99_000] = float("-inf")
    dc.save({"model": {"w": many}}, tmp_path / "many")
    export.export_folder(tmp_path / "many", tmp_path / "hf1", dtype="fp16")
    assert torch.equal(read(tmp_path / "hf1")["w"].nan_to_num(3), many.half().nan_to_num(3))
    many[70_001] = -1e6
    dc.save({"model": {"w": many}}, tmp_path / "large")
    with pytest.raises(IncompatibleError, match=r"model\.w has finite values .* infinite"):
        export.export_folder(tmp_path / "large", tmp_path / "hf2", dtype="fp16")
    assert not [name for name in os.listdir(tmp_path) if "hf2" in name]


def test_a_folder_of_others_is_exported_in_other_files(tmp_path: Path) -> None:
    export.export_folder(saved(tmp_path, {"model": tensors()}), tmp_path / "a")
    export.export_folder(tmp_path / "a", tmp_path / "b", max_shard_size="0.2 KB", reflink=True)
    assert len(os.listdir(tmp_path / "b")) > 2
    assert_same(read(tmp_path / "b"), tensors())
    export.export_folder(tmp_path / "b", tmp_path / "b", overwrite=True)
    assert os.listdir(tmp_path / "b") == ["model.safetensors"]
    assert_same(read(tmp_path / "b"), tensors())


# --- clones ------------------------------------------------------------------------------------


def test_a_file_that_holds_nothing_else_is_cloned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = saved(tmp_path, {"model": tensors(), "optim": {"m": torch.ones(3)}})
    cloned = []
    copy = os.copy_file_range

    def spied(*args: Any) -> int:
        cloned.append((args[3] % 4096, args[4] % 4096))  # where alone clones can begin
        return copy(*args)

    monkeypatch.setattr(os, "copy_file_range", spied)
    monkeypatch.setattr(OpenCheckpoint, "read", None)  # nothing is read to be written
    export.export_folder(source, tmp_path / "hf", reflink=True, max_shard_size=1)
    assert cloned == [(0, 0)]
    assert_same(read(tmp_path / "hf"), tensors())


def test_what_is_no_whole_file_is_copied_beside_it(tmp_path: Path) -> None:
    source = saved(tmp_path, {"model": tensors()}, 2)
    export.export_folder(source, tmp_path / "hf", reflink=True)
    assert_same(read(tmp_path / "hf"), tensors())
    export.export_folder(source, tmp_path / "part", reflink=True, exclude="*.weight")
    left = {name: one for name, one in tensors().items() if name != "embed.weight"}
    assert_same(read(tmp_path / "part"), left)


def test_a_converted_file_is_no_clone(tmp_path: Path) -> None:
    source = saved(tmp_path, {"model": {"w": torch.ones(3)}})
    export.export_folder(source, tmp_path / "hf", reflink=True, dtype="bf16")
    assert_same(read(tmp_path / "hf"), {"w": torch.ones(3).bfloat16()})


def test_where_the_kernel_copies_nothing_the_bytes_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: object) -> int:
        raise OSError(errno.EXDEV, "no")

    source = saved(tmp_path, {"model": tensors()})
    monkeypatch.setattr(os, "copy_file_range", refuses)
    export.export_folder(source, tmp_path / "hf", reflink=True)
    assert_same(read(tmp_path / "hf"), tensors())
    monkeypatch.delattr(os, "copy_file_range")  # as on macOS
    export.export_folder(source, tmp_path / "mac", reflink=True)
    assert_same(read(tmp_path / "mac"), tensors())


def test_a_refused_clone_is_copied_or_its_cause_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: object, **__: object) -> int:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    source = saved(tmp_path, {"model": tensors()})
    with monkeypatch.context() as patched:
        patched.setattr(export, "open", refuses, raising=False)
        export.export_folder(source, tmp_path / "hf", reflink=True)
    assert_same(read(tmp_path / "hf"), tensors())
    monkeypatch.setattr(os, "copy_file_range", refuses)
    monkeypatch.setattr(os, "unlink", refuses)
    with pytest.raises(dc.StorageError, match=r"model\.safetensors cannot be written: Operation"):
        export.export_folder(source, tmp_path / "other", reflink=True)


@pytest.mark.parametrize("reflink", [False, True])
def test_damage_is_found_and_nothing_is_left(tmp_path: Path, *, reflink: bool) -> None:
    source = saved(tmp_path, {"model": tensors()})
    (file,) = source.glob("*/*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptError, match="damaged"):
        export.export_folder(source, tmp_path / "hf", reflink=reflink)
    assert os.listdir(tmp_path) == ["one"]


# --- what is refused ---------------------------------------------------------------------------


class Extra(torch.nn.Linear):
    def get_extra_state(self) -> dict[str, int]:
        return {"scale": 3}

    def set_extra_state(self, state: Any) -> None:
        del state


def refusal(source: Path, root: Path, **options: Any) -> str:
    with pytest.raises(IncompatibleError) as error:
        export.export_folder(source, root / "hf", **options)
    assert not (root / "hf").exists()
    return str(error.value)


def test_values_are_refused_by_name_unless_they_are_left_out(tmp_path: Path) -> None:
    model = torch.nn.Sequential(Extra(2, 2))
    source = saved(tmp_path, {"model": model, "epoch": 3})
    message = refusal(source, tmp_path)
    assert "model.0._extra_state is not a tensor: leave it out" in message
    assert "epoch" not in message
    export.export_folder(source, tmp_path / "hf", exclude="*._extra_state")
    assert read(tmp_path / "hf").keys() == {"0.weight", "0.bias"}


def test_a_quantized_tensor_is_refused_by_its_own_name(tmp_path: Path) -> None:
    whole = Quantized.of(torch.ones(4, 4))
    source = saved(tmp_path, {"model": {"w": whole, "b": torch.ones(2)}})
    message = refusal(source, tmp_path)
    assert message.count("model.w") == 3  # its name, and how to leave it out
    assert "model.w is a quantized tensor" in message
    export.export_folder(source, tmp_path / "hf", exclude="model.w")
    assert_same(read(tmp_path / "hf"), {"b": torch.ones(2)})


def test_all_that_the_files_cannot_hold_is_named(tmp_path: Path) -> None:
    model = {
        "wave": torch.ones(2, dtype=torch.complex128),
        "tiny": torch.ones(2).to(torch.float8_e4m3fnuz),
        "__metadata__": torch.ones(2),
        "rng": dc.PerRank(3),
    }
    source = saved(tmp_path, {"model": model})
    message = refusal(source, tmp_path)
    assert "model.wave is complex128, which safetensors lacks: leave it out" in message
    assert (
        "model.tiny is float8_e4m3fnuz, which safetensors lacks: convert it (dtype=), or" in message
    )
    assert "'__metadata__' is a reserved name in safetensors" in message
    assert "model.rng has a value for each rank" in message
    export.export_folder(source, tmp_path / "hf", include="model.tiny", dtype="bf16")
    assert_same(read(tmp_path / "hf"), {"tiny": torch.ones(2).bfloat16()})


def test_a_component_that_is_not_there_or_is_one_tensor(tmp_path: Path) -> None:
    source = saved(tmp_path, {"net": {"w": torch.ones(2)}, "mean": torch.ones(2), "n": 3})
    assert "has no tensors in 'model': give a component that has some" in refusal(source, tmp_path)
    assert "has no tensors in 'n'" in refusal(source, tmp_path, only="n")
    assert "mean has no name within 'mean'" in refusal(source, tmp_path, only="mean")
    export.export_folder(source, tmp_path / "hf", only="net")
    assert read(tmp_path / "hf").keys() == {"w"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"dtype": "int8"}, "dtype='int8'"),
        ({"max_shard_size": 0}, "max_shard_size=0"),
        ({"max_shard_size": "5 apples"}, "max_shard_size='5 apples'"),
        ({"max_shard_size": True}, "max_shard_size=True"),
        ({"only": ""}, "only=''"),
        ({"exclude": "model.none_such"}, "matches no name"),
        ({"exclude": "model"}, "leaves no tensor"),
        ({"reflink": 1}, "reflink=1"),
        ({"overwrite": 1}, "overwrite=1"),
    ],
)
def test_options_that_make_no_sense(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    source = saved(tmp_path, {"model": tensors()})
    with pytest.raises((ValueError, TypeError), match=said):
        export.export_folder(source, tmp_path / "hf", **options)
    assert os.listdir(tmp_path) == ["one"]


@pytest.mark.parametrize(
    ("text", "nbytes"), [("5GB", 5 * 10**9), ("1.5 KiB", 1536), ("7", 7), ("2mb", 2 * 10**6)]
)
def test_sizes_as_people_write_them(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


# --- what is there already ---------------------------------------------------------------------


def test_nothing_is_replaced_unless_asked_and_only_what_an_export_has_made(tmp_path: Path) -> None:
    source, target = saved(tmp_path, {"model": tensors()}), tmp_path / "hf"
    target.mkdir()  # empty: as good as nothing
    export.export_folder(source, target, max_shard_size=100)
    with pytest.raises(ExistsError, match="--overwrite"):
        export.export_folder(source, target)
    (target / "config.json").write_text("{}")
    export.export_folder(source, target, overwrite=True)
    assert sorted(os.listdir(target)) == ["config.json", "model.safetensors"]
    assert_same(read(target), tensors())
    for name in ("theirs.safetensors", "folder"):
        if name == "folder":
            (target / name).mkdir()
        else:
            (target / name).write_bytes(b"\x02" + bytes(7) + b"{}")
        with pytest.raises(ExistsError, match=f"has {name}, which no export has written"):
            export.export_folder(source, target, overwrite=True)
        assert_same(read_one(target), tensors())
        os.rmdir(target / name) if name == "folder" else os.unlink(target / name)
    assert sorted(os.listdir(tmp_path)) == ["hf", "one"]


@pytest.mark.parametrize("to", ["other", "nowhere"])
def test_a_link_that_appears_after_the_plan_is_not_replaced(tmp_path: Path, to: str) -> None:
    source = saved(tmp_path, {"model": tensors()})
    export.export_folder(source, tmp_path / "other")
    plan = export.plan_export(source, tmp_path / "hf", overwrite=True)
    (tmp_path / "hf").symlink_to(to)
    with pytest.raises(ExistsError, match=f"hf is now a link to {to}"):
        plan.run(None)
    assert (tmp_path / "hf").is_symlink()
    assert_same(read_one(tmp_path / "other"), tensors())
    assert sorted(os.listdir(tmp_path)) == ["hf", "one", "other"]


def read_one(folder: Path) -> dict[str, torch.Tensor]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def test_places_where_no_folder_can_be(tmp_path: Path) -> None:
    source = saved(tmp_path, {"model": tensors()})
    with pytest.raises(ValueError, match="inside the source"):
        export.export_folder(source, source / "hf")
    with pytest.raises(ExistsError, match="no export has written"):
        export.export_folder(source, source, overwrite=True)
    with pytest.raises(NotFoundError, match="make it first"):
        export.export_folder(source, tmp_path / "a" / "b")
    (tmp_path / "file").write_text("")
    with pytest.raises(ExistsError, match="is not a folder"):
        export.export_folder(source, tmp_path / "file", overwrite=True)
    with pytest.raises(NotFoundError):
        export.export_folder(tmp_path / "none", tmp_path / "hf")


@pytest.mark.parametrize("can_exchange", [True, False])
def test_an_overwrite_needs_no_exchange(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, can_exchange: bool
) -> None:
    if not can_exchange:
        monkeypatch.setattr(new_files, "exchange_names", lambda *_: False)
    dc.save({"model": {"w": torch.zeros(3)}}, tmp_path / "old")
    export.export_folder(tmp_path / "old", tmp_path / "hf")
    export.export_folder(saved(tmp_path, {"model": tensors()}), tmp_path / "hf", overwrite=True)
    assert_same(read(tmp_path / "hf"), tensors())
    assert sorted(os.listdir(tmp_path)) == ["hf", "old", "one"]


# --- faults ------------------------------------------------------------------------------------


@pytest.mark.parametrize("sticky", [False, True])
@pytest.mark.parametrize("is_there", [False, True])
def test_whatever_call_fails_nothing_looks_complete_that_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, sticky: bool, is_there: bool
) -> None:
    source = saved(tmp_path, {"model": tensors()})
    old = {"w": torch.zeros(3)}
    dc.save({"model": old}, tmp_path / "old")
    full = OSError(errno.ENOSPC, "No space left on device")
    for number in range(1, 200):
        root = tmp_path / f"{number}"
        root.mkdir()
        if is_there:
            export.export_folder(tmp_path / "old", root / "hf")
        storage = FaultyStorage(
            open_storage(root)[0],
            fail_at_call=number,
            error=dc.StorageError(str(full)),
            sticky=sticky,
        )
        with monkeypatch.context() as patched:
            patched.setattr(export, "open_storage", lambda path, s=storage: (s, str(path)))
            failed = None
            try:
                export.export_folder(source, root / "hf", overwrite=is_there, max_shard_size=100)
            except dc.StorageError as error:
                failed = error
        names = [name for name in os.listdir(root) if not name.startswith(".")]
        if failed is None and not storage.failed:
            break
        # Of what could not be made durable under its name, the old stays beside the new.
        leaves = "remove" in storage.failed or storage.failed == f"sync {root}"
        if not sticky and failed is not None and not leaves:
            assert os.listdir(root) == names, storage.failed
        # All of the old, or all of the new; the call that failed tells no more than that.
        found = read(root / "hf") if names else None
        if found is None:
            assert not is_there
            assert failed is not None
        elif found.keys() == old.keys():
            assert is_there
            assert failed is not None
        else:
            assert_same(found, tensors())
    assert number > 15
    assert_same(read(root / "hf"), tensors())


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_clone_that_finds_no_space_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def full(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    source = saved(tmp_path, {"model": tensors()})
    monkeypatch.setattr(os, "copy_file_range", full)
    with pytest.raises(dc.StorageError, match=os.strerror(code)):
        export.export_folder(source, tmp_path / "hf", reflink=True)
    assert os.listdir(tmp_path) == ["one"]


DIES = """
import os, sys
from dist_ckpt.interop.hf import export as hf
def dies(done, total):
    if done > total // 2:
        os._exit(9)
hf.WINDOW_NBYTES = 64
hf.export_folder(sys.argv[1], sys.argv[2], progress=dies)
"""


def test_a_process_that_dies_leaves_nothing_that_others_would_read(tmp_path: Path) -> None:
    source = saved(tmp_path, {"model": tensors()})
    command = [sys.executable, "-c", DIES, f"{source}", f"{tmp_path}/hf"]
    assert subprocess.run(command, check=False, timeout=60).returncode == 9
    assert not (tmp_path / "hf").exists()
    (left,) = (name for name in os.listdir(tmp_path) if name != "one")
    assert left.startswith(".hf.")
    assert left.endswith(".tmp")
    export.export_folder(source, tmp_path / "hf")
    assert_same(read(tmp_path / "hf"), tensors())


# Of memory that it takes after its imports it may have no more than that. What threads may use of
# their stacks counts, so those are small: the next begin before the last are gone.
LIMITED = """
import os, resource, sys, threading
threading.stack_size(256 << 10)
from dist_ckpt.interop.hf import export as hf
used = next(int(line.split()[1]) for line in open("/proc/self/status") if "VmData" in line)
limit = (used << 10) + int(sys.argv[3])
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
assert "torch" not in sys.modules
hf.export_folder(sys.argv[1], sys.argv[2])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
def test_it_needs_far_less_memory_than_the_tensors_take(tmp_path: Path) -> None:
    one = torch.arange(24 << 20).reshape(64, -1)  # 192 MiB
    source = saved(tmp_path, {"model": {"w": one}}, 2)
    command = [sys.executable, "-c", LIMITED, f"{source}", f"{tmp_path}/hf", f"{96 << 20}"]
    environ = {**os.environ, "DIST_CKPT_THREADS": "2"}
    subprocess.run(command, check=True, timeout=120, env=environ)
    assert_same(read(tmp_path / "hf"), {"w": one})


# --- the command -------------------------------------------------------------------------------


def test_the_command_writes_a_folder(tmp_path: Path, run: Callable[..., Any]) -> None:
    source = saved(tmp_path, {"model": tensors(), "ema": {"w": torch.ones(4)}})
    options = ("--dtype", "bf16", "--max-shard-size", "100", "--exclude", "*.count")
    code, out, err = run("export", "--format", "hf", *options, source, tmp_path / "hf")
    assert (code, err) == (0, "")
    assert f"{tmp_path}/hf: " in out
    expected = {n: t.bfloat16() if t.is_floating_point() else t for n, t in tensors().items()}
    del expected["count"]
    assert_same(read(tmp_path / "hf"), expected)
    others = ("--only", "ema", "--reflink", "--overwrite")
    assert run("export", "--format", "hf", *others, source, tmp_path / "hf")[0] == 0
    assert read(tmp_path / "hf").keys() == {"w"}


def test_the_command_refuses_with_a_line(tmp_path: Path, run: Callable[..., Any]) -> None:
    source = saved(tmp_path, {"net": tensors()})
    code, _, err = run("export", "--format", "hf", source, tmp_path / "hf")
    assert code != 0
    assert "--only" in err
    assert "Traceback" not in err
    code, _, err = run("export", "--format", "hf", "--version", 1, source, tmp_path / "hf")
    assert (code, "--version is not for --format hf" in err) == (2, True)
    code, _, err = run("export", "--format", "shrew", "--dtype", "bf16", source, tmp_path / "f")
    assert (code, "--dtype is not for --format shrew" in err) == (2, True)
    assert os.listdir(tmp_path) == ["one"]
