"""The private names of FSDP1: where they are, and that they say what we take them to say."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from dist_ckpt.core.state.fsdp1 import fsdp1_private_names

# A group of one rank leaves FSDP1 nothing to cut, and it says so.
pytestmark = pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`")

CPU = torch.device("cpu")


@pytest.fixture(params=[True, False], ids=["orig", "flat"])
def wrapped(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A model of one rank under FSDP1, which then cuts nothing, with two tied parameters."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, bias=False))
        model[1].weight = model[0].weight
        yield FullyShardedDataParallel(model, use_orig_params=request.param, device_id=CPU)
    finally:
        dist.destroy_process_group()


NAMES_OF = {
    "the wrapper": lambda model: model,
    "the handle": lambda model: model._handle,
    "flat parameter": lambda model: model._handle.flat_param,
    "a parameter": lambda model: next(model.parameters()),
    "any module": lambda model: model,
}
# Of a cut, in which a rank has a part; `tests/multi_process/test_fsdp1.py` has them.
OF_A_CUT = {"_full_param_padded", "_full_prec_full_param_padded"}


def test_every_private_name_in_the_table_is_where_we_look_for_it(wrapped: Any):
    wrapped(torch.ones(1, 3))
    rows = [
        line.split("|")[1:3] for line in fsdp1_private_names.__doc__.splitlines() if line[:1] == "|"
    ]
    names = {(of.strip(), name) for of, cell in rows for name in re.findall("`(.*?)`", cell)}
    assert {of for of, _ in names} == {*NAMES_OF, "torch"}
    for of, name in names:
        if of != "torch" and name not in OF_A_CUT:
            assert hasattr(NAMES_OF[of](wrapped), name), (of, name)


def test_every_private_name_that_is_used_is_in_the_table():
    text = fsdp1_private_names.__doc__
    source = Path(fsdp1_private_names.__file__).read_text().removeprefix(f'"""{text}"""')
    used = set(re.findall(r"(?:\.|\")(_[a-z]\w+)", source))
    assert {name for name in used if f"`{name}`" not in text} <= {"_common_utils"}


def test_parameters_are_found_with_all_their_places_and_their_memory(wrapped: Any):
    (flat,) = fsdp1_private_names.flat_parameters(wrapped)
    assert not flat.is_cut
    weight, bias = flat.originals
    assert [name for _, name in weight.owners] == ["weight", "weight"]
    assert [owner for owner, _ in weight.owners] == [*wrapped.module]
    assert (weight.shape, weight.start, weight.numel) == ((3, 3), 0, 9)
    assert (bias.shape, bias.start, bias.numel) == ((3,), 0, 3)
    with torch.no_grad():
        flat.shard[bias.offset : bias.offset + 3] = 7.0
    wrapped(torch.ones(1, 3))
    with FullyShardedDataParallel.summon_full_params(wrapped):
        assert wrapped.module[0].bias.tolist() == [7.0] * 3


def test_a_module_without_fsdp1_is_told_from_one_with_it(wrapped: Any):
    assert fsdp1_private_names.has_fsdp1(nn.Sequential(wrapped))
    assert not fsdp1_private_names.has_fsdp1(nn.Linear(1, 1))
    assert not fsdp1_private_names.is_flattened(nn.Parameter(torch.ones(1)))
    assert all(fsdp1_private_names.is_flattened(parameter) for parameter in wrapped.parameters())
