"""A user's files, in by one command, loaded on other ranks by one line, and out again by another.

Every value is the same bit for bit, with the names that it had; what was tied is tied.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import dist_ckpt as dc
from commands import run
from dist_ckpt.interop.dcp import adapter as ours
from long_mode import sampled_params
from ranks import run_ranks

pytestmark = [
    pytest.mark.multi_process,
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
]

__all__ = ["run"]  # a fixture

Flat = dict[str, Any]
Command = Callable[..., None]


class Net(nn.Module):
    """Sizes that ranks do not divide, a buffer, and a tied weight."""

    def __init__(self, *, is_tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 11, bias=False)
        if is_tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> Any:
        return self.head(self.norm(self.embed(tokens)))


def made(seed: int, *, is_tied: bool = True) -> tuple[Any, torch.optim.Optimizer]:
    """Return a model and its optimizer, sharded if there are ranks."""
    torch.manual_seed(seed)
    model: Any = Net(is_tied=is_tied)
    if dist.is_initialized():
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1 / seed)


def trained(*, is_tied: bool = True) -> tuple[Any, torch.optim.Optimizer]:
    model, optimizer = made(1, is_tied=is_tied)
    for number in range(2):
        model(torch.arange(5) + number).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def flat(value: Any, name: str = "") -> Flat:
    """Return what is in a state by names, of tensors all that they are: ranks return plain data."""
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if isinstance(value, torch.Tensor):
        whole = value.detach().contiguous()
        return {name: (str(whole.dtype), tuple(whole.shape), whole.numpy().tobytes())}
    if not isinstance(value, Mapping | list):
        return {name: value}
    items = value.items() if isinstance(value, Mapping) else enumerate(value)
    return {k: v for key, child in items for k, v in flat(child, f"{name}.{key}").items()}


def assert_same(expected: Flat, found: Flat) -> None:
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert value == found[name], name


def all_of(model: Any, optimizer: torch.optim.Optimizer) -> Flat:
    return flat([*get_state_dict(model, optimizer)])


def save_by_dcp(rank: int, folder: str, is_tied: bool) -> Flat:
    del rank
    model, optimizer = trained(is_tied=is_tied)
    model_state, optim_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optim": optim_state}, checkpoint_id=folder)
    return all_of(model, optimizer)


def load_imported(rank: int, path: str, is_tied: bool) -> tuple[Flat, bool]:
    del rank
    model, optimizer = made(3, is_tied=is_tied)
    dc.load({"model": model, "optim": optimizer}, path)  # the one line
    return all_of(model, optimizer), model.head.weight is model.embed.weight


def load_where_it_lies(rank: int, folder: str, is_tied: bool) -> Flat:
    del rank
    model, optimizer = made(4, is_tied=is_tied)
    ours.load({"model": model, "optim": optimizer}, folder)  # the one line
    return all_of(model, optimizer)


def load_by_dcp(rank: int, folder: str, is_tied: bool) -> Flat:
    del rank
    model, optimizer = made(5, is_tied=is_tied)
    model_state, optim_state = get_state_dict(model, optimizer)
    dcp.load({"model": model_state, "optim": optim_state}, checkpoint_id=folder)
    return flat([model_state, optim_state])


@pytest.fixture
def command(run: Callable[..., tuple[int, str, str]]) -> Command:
    """Return what runs a command that must succeed."""

    def call(*arguments: object) -> None:
        code, _, errors = run(*arguments)
        assert (code, errors) == (0, "")

    return call


@pytest.mark.parametrize("is_tied", sampled_params([True, False], 2))
def test_a_folder_of_dcp_of_four_ranks(tmp_path: Path, command: Command, is_tied: bool) -> None:
    # What is tied DCP has written twice.
    theirs, mine, back = tmp_path / "theirs", tmp_path / "ours", tmp_path / "back"
    expected = run_ranks(save_by_dcp, f"{theirs}", is_tied, world_size=4, timeout_s=100)[0]
    command("import", "--from", "dcp", theirs, mine, "--ranks", 3, "--step", 2)
    for found, is_still_tied in run_ranks(
        load_imported, f"{mine}", is_tied, world_size=2, timeout_s=100
    ):
        assert_same(expected, found)
        assert is_still_tied == is_tied
    for found in run_ranks(load_where_it_lies, f"{theirs}", is_tied, world_size=3, timeout_s=100):
        assert_same(expected, found)
    command("export", "--format", "dcp", mine, back)
    by_dcp, by_dcp_too = (
        run_ranks(load_by_dcp, f"{folder}", is_tied, world_size=2, timeout_s=100)
        for folder in (theirs, back)
    )
    for one, other in zip(by_dcp, by_dcp_too, strict=True):
        assert_same(one, other)
    readers = (dcp.FileSystemReader(one) for one in (theirs, back))
    names = [{*reader.read_metadata().state_dict_metadata} for reader in readers]
    assert names[0] == names[1]


def load_model(rank: int, path: str) -> tuple[Flat, bool]:
    del rank
    model, _ = made(3)
    dc.load({"model": model}, path)  # the one line, of the imported and of their folder
    return flat(model.state_dict()), model.head.weight is model.embed.weight


def test_a_folder_of_hugging_face_with_tied_weights(tmp_path: Path, command: Command) -> None:
    theirs, mine, back = tmp_path / "theirs", tmp_path / "ours", tmp_path / "back"
    theirs.mkdir()
    model, _ = trained()
    # As transformers writes it: of tied weights the first name alone.
    weights = {n: v for n, v in model.state_dict().items() if n != "head.weight"}
    save_file(weights, theirs / "model.safetensors", {"format": "pt"})
    command("import", "--from", "hf", theirs, mine, "--ranks", 3)
    for path in (mine, theirs):
        for found, is_tied in run_ranks(load_model, f"{path}", world_size=2, timeout_s=100):
            assert_same(flat(model.state_dict()), found)
            assert is_tied
    command("export", "--format", "hf", mine, back)
    assert_same(flat(weights), flat(load_file(back / "model.safetensors")))


def test_a_file_of_torch_save(tmp_path: Path, command: Command) -> None:
    theirs, mine, back = tmp_path / "theirs.pt", tmp_path / "ours", tmp_path / "back"
    model, optimizer = trained()
    state = {"model": model.state_dict(), "optim": optimizer.state_dict()}
    torch.save(state, theirs)
    command("import", "--from", "torch", theirs, mine, "--ranks", 3)
    for found, is_tied in run_ranks(load_imported, f"{mine}", True, world_size=2, timeout_s=100):
        assert_same(all_of(model, optimizer), found)
        assert is_tied
    with dc.open(mine) as stored:
        assert dict(stored.index.catalog.aliases) == {"model.head.weight": "model.embed.weight"}
    # And back: the state is a dict of plain data and tensors again, which torch.save takes.
    found_state: Flat = {}
    dc.load(found_state, mine)
    torch.save(found_state, back)
    loaded = torch.load(back)
    assert_same(flat(state), flat(loaded))
    tied = (loaded["model"][name] for name in ("embed.weight", "head.weight"))
    assert len({one.data_ptr() for one in tied}) == 1
