"""What DCP's tests check in one process: each scenario a function of a way and a new folder."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import IO, Any
from unittest import mock

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as OldProperties
from torch.distributed.checkpoint._extension import StreamTransformExtension
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

import dist_ckpt as dc
from dcp_ways import State, Way, error_of, same, whole
from dist_ckpt.interop.hf.export import export_folder


class Net(nn.Module):
    """Layers of three kinds; `seed` says with which values."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.rows = nn.Linear(5, 5)
        self.out = nn.Linear(5, 1)
        self.bag = nn.EmbeddingBag(5, 10)

    def forward(self, x: torch.Tensor) -> Any:
        return self.out(self.rows(x).relu()) * self.bag(torch.tensor([[0, 3]])).sum()


class Kept:
    """An object with a state of its own."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.num_loaded = 0

    def state_dict(self) -> State:
        return self.state

    def load_state_dict(self, state: State) -> None:
        self.state = state
        self.num_loaded += 1


def goes_there_and_back(way: Way, path: str, saved: State, loaded: State) -> None:
    assert not same(loaded, saved)
    way.save(saved, f"{path}/a")
    way.load(loaded, f"{path}/a")
    assert same(loaded, saved)


# --- test_file_system_checkpoint_cpu.py --------------------------------------------------------


def tensors_of_a_model(way: Way, path: str) -> None:
    goes_there_and_back(way, path, Net(1).state_dict(), Net(2).state_dict())


def tensors_of_another_dtype(way: Way, path: str) -> None:
    way.save({"w": torch.full((4, 3), 1 / 3)}, f"{path}/a")
    loaded = {"w": torch.zeros(4, 3, dtype=torch.bfloat16)}
    way.load(loaded, f"{path}/a")
    assert same(loaded, {"w": torch.full((4, 3), 1 / 3).to(torch.bfloat16)})


def bytes_of_an_object(way: Way, path: str) -> None:
    loaded: State = {**Net(2).state_dict(), "kept": Kept({"blob": b""})}
    way.save({**Net(1).state_dict(), "kept": Kept({"blob": b"some bytes \x00\xff"})}, f"{path}/a")
    way.load(loaded, f"{path}/a")
    assert loaded.pop("kept").state == {"blob": b"some bytes \x00\xff"}
    assert same(loaded, Net(1).state_dict())


class Turned(StreamTransformExtension):
    """An extension of DCP's that turns every bit of what is written."""

    @staticmethod
    def from_descriptor(version: str) -> Turned:
        return Turned()

    @staticmethod
    def registry_name() -> str:
        return "stream.turned"

    def get_descriptor(self) -> str:
        return "stream.turned/1"

    def transform_to(self, output: IO[bytes]) -> Any:
        return _Turning(output)

    def transform_from(self, input: IO[bytes]) -> IO[bytes]:  # noqa: A002
        return io.BytesIO(bytes(byte ^ 255 for byte in input.read()))


class _Turning(io.RawIOBase):
    def __init__(self, output: IO[bytes]) -> None:
        super().__init__()
        self.output = output

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return self.output.write(bytes(byte ^ 255 for byte in bytes(data)))

    def flush(self) -> None:
        if not self.output.closed:
            self.output.flush()


def a_folder_that_an_extension_changed(way: Way, path: str) -> None:
    saved = {"w": torch.ones(3)}
    dcp.save(saved, storage_writer=dcp.FileSystemWriter(f"{path}/a", _extensions=[Turned()]))
    loaded = {"w": torch.zeros(3)}
    if way.name == "dcp":  # which must be told of it
        registry = mock.Mock(from_descriptor_list=lambda _: [Turned()])
        reader = dcp.FileSystemReader(f"{path}/a", _extension_registry=registry)
        dcp.load(loaded, storage_reader=reader)
    else:
        way.load_folder(loaded, f"{path}/a")
    assert same(loaded, saved)


# --- test_planner.py ---------------------------------------------------------------------------


def fewer_or_more_keys(way: Way, path: str) -> None:
    way.save({"module": nn.Linear(2, 2)}, f"{path}/a")
    larger = nn.Linear(2, 2)
    larger.extra = nn.Parameter(torch.full((2,), 7.0))
    message = error_of(lambda: way.load({"module": larger}, f"{path}/a"))
    assert "module.extra" in message
    way.load({"module": larger}, f"{path}/a", partial=True)
    assert same(larger.extra, torch.full((2,), 7.0))


def another_size(way: Way, path: str) -> None:
    way.save({"module": nn.Linear(2, 2)}, f"{path}/a")
    larger = nn.Linear(3, 2)
    before = whole(larger.state_dict())
    message = error_of(lambda: way.load({"module": larger}, f"{path}/a"))
    assert "module.weight" in message
    assert "2, 2" in message
    assert "2, 3" in message
    assert same(larger.state_dict(), before)


# --- e2e/test_e2e_save_and_load.py -------------------------------------------------------------


class Watched(dict[str, Any]):
    """A dict that notes what is put into it."""

    def __init__(self, **values: Any) -> None:
        super().__init__(**values)
        self.replaced: list[str] = []

    def __setitem__(self, key: str, value: Any) -> None:
        self.replaced.append(key)
        super().__setitem__(key, value)


def objects_stay_and_values_are_replaced(way: Way, path: str) -> None:
    kept = Kept({"n": 1})
    tensor = torch.ones(3)
    state = Watched(kept=kept, tensor=tensor, values=[1, 2])
    way.save(state, f"{path}/a")
    kept.state, state["values"] = {"n": 2}, [3]
    tensor.zero_()
    state.replaced.clear()
    way.load(state, f"{path}/a")
    assert (kept.state, kept.num_loaded) == ({"n": 1}, 1)
    assert state["kept"] is kept
    assert "kept" not in state.replaced
    assert state["tensor"] is tensor
    assert same(tensor, torch.ones(3))
    assert state["values"] == [1, 2]
    assert "values" in state.replaced


def nothing_at_all(way: Way, path: str) -> None:
    way.save({}, f"{path}/a")
    state: State = {}
    way.load(state, f"{path}/a")
    assert state == {}


def dicts_of_the_helpers_are_filled_in_place(way: Way, path: str) -> None:
    model, other = Net(1), Net(2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    other_optimizer = torch.optim.Adam(other.parameters(), lr=0.2)
    model_state = get_model_state_dict(other)
    optim_state = get_optimizer_state_dict(other, other_optimizer)
    saved = {
        "model": get_model_state_dict(model),
        "optim": get_optimizer_state_dict(model, optimizer),
    }
    way.save(saved, f"{path}/a")
    state = {"model": model_state, "optim": optim_state}
    way.load(state, f"{path}/a")
    assert state["model"] is model_state
    assert state["optim"] is optim_state
    assert same(state, saved)
    set_state_dict(
        other, other_optimizer, model_state_dict=model_state, optim_state_dict=optim_state
    )
    assert other_optimizer.param_groups[0]["lr"] == 0.1
    assert same(other.state_dict(), model.state_dict())


def a_part_of_the_state(way: Way, path: str) -> None:
    model, optimizer = trained(1)
    way.save_trained(model, optimizer, f"{path}/a")
    other = Net(2)
    way.load({"model": other}, f"{path}/a", partial=True)
    assert same(other.state_dict(), model.state_dict())


def saved_at_once(way: Way, state: State, where: str) -> object:
    wait = way.async_save(state, where)
    return wait()


def a_save_that_fails_lets_the_next_succeed(way: Way, path: str) -> None:
    blocked = Path(path) / "file"
    blocked.write_text("in the way")
    state = {"w": torch.ones(3), "epoch": 5}
    assert error_of(lambda: saved_at_once(way, state, f"{blocked}/a"))
    way.async_save(state, f"{path}/a")()
    loaded = {"w": torch.zeros(3), "epoch": 0}
    way.load(loaded, f"{path}/a")
    assert same(loaded, state)


# --- test_nested_dict.py, test_compatibility.py, test_save_load_api.py -------------------------


NESTED = {
    "key0": 1,
    "key1": [1, 2],
    "key2": {"1": 2, "2": 3},
    "key3": torch.tensor([1]),
    "key4": [[torch.tensor(2), "x"], [1, 2, 3], {"key6": [44]}],
}


def nested_values(way: Way, path: str) -> None:
    loaded = {
        "key0": 0,
        "key1": [0],
        "key2": {"1": 0, "2": 0},
        "key3": torch.tensor([0]),
        "key4": [[torch.tensor(0), ""], [0], {"key6": [0]}],
    }
    goes_there_and_back(way, path, NESTED, loaded)


def tensors_deep_in_lists(way: Way, path: str) -> None:
    saved = {
        "k0": [1],
        "k2": [torch.tensor([1]), 99, [{"k3": torch.tensor(1)}]],
        "k3": ["x", 99, [{"k3": "y"}]],
    }
    loaded = {
        "k0": [0],
        "k2": [torch.tensor([0]), 0, [{"k3": torch.tensor(0)}]],
        "k3": ["", 0, [{"k3": ""}]],
    }
    goes_there_and_back(way, path, saved, loaded)


def a_folder_of_an_older_torch(way: Way, path: str) -> None:
    saved = {"a": torch.arange(16.0).view(4, 4)}
    with mock.patch("torch.distributed.checkpoint.metadata.TensorProperties", OldProperties):
        dcp.save(saved, storage_writer=dcp.FileSystemWriter(f"{path}/a"))
    loaded = {"a": torch.zeros(4, 4)}
    way.load_folder(loaded, f"{path}/a")
    assert same(loaded, saved)


def where_it_was_saved(way: Way, path: str) -> None:
    way.save({"a": torch.zeros(4, 4)}, f"{path}/a")
    if way.name == "dist_ckpt":
        with dc.open(f"{path}/a") as found:
            assert found.path == f"{path}/a"
    else:
        reader: Any = way.reader(f"{path}/a")  # type: ignore[attr-defined]
        assert os.fspath(reader.read_metadata().storage_meta.checkpoint_id) == f"{path}/a"


def a_place_of_no_known_kind(way: Way, path: str) -> None:
    if way.name == "dcp":  # which looks for a writer by the path
        message = error_of(lambda: dcp.save({"a": 1}, checkpoint_id="abc://abc.abc"))
        assert "Cannot detect" in message
        return
    way.save({"a": torch.zeros(2)}, "abc://abc.abc")


# --- test_format_utils.py, test_torch_save_to_dcp.py -------------------------------------------


def out_to_a_file_of_torch_save(way: Way, path: str) -> None:
    way.save({"model": Net(1)}, f"{path}/a")
    dcp_to_torch_save(way.folder(f"{path}/a"), f"{path}/model.pt")
    loaded = torch.load(f"{path}/model.pt", weights_only=True)  # noqa: TID251
    assert same(loaded, {"model": dict(Net(1).state_dict())})


def in_from_a_file_of_torch_save(way: Way, path: str) -> None:
    torch.save({"model": Net(1).state_dict()}, f"{path}/model.pt")  # noqa: TID251
    model = Net(2)
    way.load_file({"model": model}, f"{path}/model.pt")
    assert same(model.state_dict(), Net(1).state_dict())


# --- test_hf_storage.py, test_hf_safetensor_e2e.py ---------------------------------------------


def out_to_safetensors(way: Way, path: str) -> None:
    if way.name == "dcp":
        writer = dcp.HuggingFaceStorageWriter(f"{path}/hf")
        dcp.save(Net(1).state_dict(), storage_writer=writer)
    else:
        way.save({"model": Net(1).state_dict()}, f"{path}/a")
        export_folder(f"{path}/a", f"{path}/hf")
    (file,) = Path(path, "hf").glob("*.safetensors")
    assert same(load_file(file), dict(Net(1).state_dict()))


NUMBERED = "model-00001-of-00001.safetensors"


def safetensors(path: str, name: str = NUMBERED) -> str:
    os.makedirs(f"{path}/hf")
    save_file(dict(Net(1).state_dict()), f"{path}/hf/{name}")
    return f"{path}/hf"


def in_from_safetensors(way: Way, path: str) -> None:
    loaded = dict(Net(2).state_dict())
    way.load_hf(loaded, safetensors(path, "model.safetensors"))
    assert same(loaded, dict(Net(1).state_dict()))


def in_from_safetensors_without_an_index(way: Way, path: str) -> None:
    loaded = dict(Net(2).state_dict())
    way.load_hf(loaded, safetensors(path))
    assert same(loaded, dict(Net(1).state_dict()))


def all_that_safetensors_hold(way: Way, path: str) -> None:
    loaded: State = {}
    file = f"{safetensors(path)}/{NUMBERED}"
    if way.name == "dist_ckpt":
        way.load(loaded, file)
    else:
        reader: Any = dcp.HuggingFaceStorageReader(f"{path}/hf")
        if way.name == "adapter":
            reader = way.reader(file)  # type: ignore[attr-defined]
        loaded = _load_state_dict_from_keys(storage_reader=reader)
    assert same(loaded.get("model", loaded), dict(Net(1).state_dict()))


def safetensors_of_other_sizes(way: Way, path: str) -> None:
    loaded = {name: torch.zeros(1) for name in Net(1).state_dict()}
    if way.name == "dcp":
        return  # which has a planner that makes them larger
    way.load_hf(loaded, safetensors(path, "model.safetensors"))


# --- test_state_dict_stager.py -----------------------------------------------------------------


def views_of_one_memory(way: Way, path: str) -> None:
    one, other = torch.arange(16.0).view(4, 4), torch.arange(16.0, 32.0).view(4, 4)
    state = {"one": one, "flat": one.view(16), "deep": {"all": other, "rows": other[:2]}}
    expected = whole(state)
    wait = way.async_save(state, f"{path}/a")
    wait()
    loaded = {
        "one": torch.zeros(4, 4),
        "flat": torch.zeros(16),
        "deep": {"all": torch.zeros(4, 4), "rows": torch.zeros(2, 4)},
    }
    way.load(loaded, f"{path}/a")
    assert same(loaded, expected)


def what_was_staged_is_what_is_saved(way: Way, path: str) -> None:
    state: State = {"w": torch.zeros(4, 4)}
    for number in range(3):
        state["w"].fill_(number)
        wait = way.async_save({**state, "n": number}, f"{path}/{number}")
        state["w"].fill_(-1)
        wait()
    for number in range(3):
        loaded = {"w": torch.zeros(4, 4), "n": -1}
        way.load(loaded, f"{path}/{number}")
        assert same(loaded, {"w": torch.full((4, 4), float(number)), "n": number})


DTYPES = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool, torch.uint8),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.complex64, torch.complex128),
)


def tensors_of_many_dtypes(way: Way, path: str) -> None:
    saved = {str(dtype): torch.tensor([[0, 1], [2, 3]]).to(dtype) for dtype in DTYPES}
    loaded = {str(dtype): torch.zeros(2, 2, dtype=dtype) for dtype in DTYPES}
    goes_there_and_back(way, path, saved, loaded)


# --- test_state_dict.py ------------------------------------------------------------------------


def trained(seed: int, **options: Any) -> tuple[Any, Any]:
    model = Net(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 / (seed + 1), **options)
    for number in range(2):
        model(torch.full((2, 5), number + 1.0)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def a_trained_model_without_ranks(way: Way, path: str) -> None:
    model, optimizer = trained(1, amsgrad=True)
    other, other_optimizer = trained(2, amsgrad=True)
    way.save_trained(model, optimizer, f"{path}/a")
    way.load_trained(other, other_optimizer, f"{path}/a")
    assert same(other.state_dict(), model.state_dict())
    assert same(other_optimizer.state_dict(), optimizer.state_dict())


class Extra(Net):
    """A module with extra state, and a buffer that is not saved."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.extra: Any = {"seed": seed, "scale": torch.tensor([float(seed)])}
        self.register_buffer("scratch", torch.full((3,), float(seed)), persistent=False)

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def extra_state_of_a_module(way: Way, path: str) -> None:
    model, other = Extra(1), Extra(2)
    way.save({"model": model}, f"{path}/a")
    way.load({"model": other}, f"{path}/a")
    assert same(other.extra, {"seed": 1, "scale": torch.tensor([1.0])})


def buffers_that_are_not_persistent(way: Way, path: str) -> None:
    model, other = Extra(1), Extra(2)
    way.save({"model": model}, f"{path}/a")
    way.load({"model": other}, f"{path}/a")
    assert same(other.scratch, torch.full((3,), 2.0))
    assert same(other.rows.weight, model.rows.weight)


class Tied(nn.Module):
    """Two names of one weight."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(6, 3)
        self.decoder = nn.Linear(3, 6)
        self.decoder.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> Any:
        return self.decoder(self.embedding(x))


def tied(seed: int) -> tuple[Any, Any]:
    model = Tied(seed)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    return model, optimizer


def tied_weights(way: Way, path: str) -> None:
    model, optimizer = tied(1)
    other, other_optimizer = tied(2)
    way.save_trained(model, optimizer, f"{path}/a")
    way.load_trained(other, other_optimizer, f"{path}/a")
    assert other.decoder.weight is other.embedding.weight
    assert same(other.state_dict(), model.state_dict())
    assert same(other_optimizer.state_dict(), optimizer.state_dict())


def a_learning_rate_that_a_scheduler_set(way: Way, path: str) -> None:
    model, optimizer = trained(1)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)
    other, other_optimizer = trained(2)
    assert "initial_lr" not in other_optimizer.param_groups[0]
    way.save_trained(model, optimizer, f"{path}/a")
    torch.optim.lr_scheduler.LambdaLR(other_optimizer, lambda epoch: 0.5**epoch)
    way.load_trained(other, other_optimizer, f"{path}/a")
    assert other_optimizer.param_groups[0]["initial_lr"] == 0.05
