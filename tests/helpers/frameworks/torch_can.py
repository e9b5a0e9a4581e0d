"""What older versions of torch cannot do: the tests that need it skip there, and say why."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from inspect import signature

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

from dist_ckpt.core.runtime.torch_private import StridedShard, cuts_strided_alike


def cut_unevenly() -> bool:
    """Say whether FSDP2 over TP takes sizes that do not divide evenly, as it does not in 2.7."""
    try:
        StridedShard(0, split_factor=2)._split_tensor(torch.arange(8), 3, with_padding=False)
    except AssertionError:
        return False
    return True


def need_strided(placements: Iterable[object]) -> None:
    """Skip the test if these placements are some that this torch cuts otherwise than today's."""
    if not cuts_strided_alike() and any(isinstance(one, StridedShard) for one in placements):
        pytest.skip("this torch cuts strided shards unevenly in another way, or not at all")


@cache
def wrap_several_boxes() -> bool:
    """Say whether torch takes two boxes as one local tensor, as 2.7 does not."""
    wrapper = LocalShardsWrapper([torch.ones(2, 1), torch.ones(2, 1)], [(0, 0), (0, 1)])
    try:
        wrapper.view_as(wrapper)
    except RuntimeError:
        return False
    return True


def average_over_gloo() -> bool:
    """Say whether gloo averages where FSDP2 asks for it: in 2.7 it sums, and says nothing."""
    return not torch.__version__.startswith("2.7.")


# Types and what torchrun prints are those of the torch that CI pins.
of_the_pinned_torch = pytest.mark.skipif(
    not torch.__version__.startswith("2.13."), reason="what is shown is of torch 2.13"
)


def save_by_dcp_without_collectives() -> bool:
    """Say whether ranks of DCP may plan each by itself, as they may not in 2.7."""
    return "use_collectives" in signature(dcp.save).parameters


def write_safetensors_by_dcp() -> bool:
    """Say whether DCP writes files of safetensors, as it does not in 2.7."""
    return "serialization_format" in signature(dcp.FileSystemWriter).parameters


def bind_the_store() -> bool:
    """Say whether torch's store takes a socket that listens; in 2.7 the default one does not."""
    return not torch.__version__.startswith("2.7.")


def keep_a_stager() -> bool:
    """Say whether DCP's stagers can be kept: in 2.11 the first save ends in a KeyError."""
    return not torch.__version__.startswith("2.11.")
