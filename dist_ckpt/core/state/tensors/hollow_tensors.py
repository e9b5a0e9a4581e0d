"""Recognise parameters whose value is elsewhere, by the marks that their libraries leave.

An empty shape alone says nothing: a model may have empty parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import nn

_PARTITIONED = (
    "it is empty here, because DeepSpeed ZeRO-3 has partitioned it (ds_id, ds_status): save and "
    "load inside `deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0)`, "
    "or use `save_checkpoint` of the engine and `dist-ckpt import --from deepspeed`"
)
_OFFLOADED = (
    "it is on the meta device, because a hook of accelerate has offloaded its value: save what "
    "`accelerate.utils.get_state_dict_offloaded_model(model)` returns, and load before the model "
    "is dispatched or offloaded"
)


def partition_reason(tensor: torch.Tensor) -> str | None:
    """Return why a parameter without elements has no value; None if nothing marks it."""
    if tensor.numel():
        return None
    status = getattr(tensor, "ds_status", None)
    if status is None or not hasattr(tensor, "ds_id"):
        return None
    # ZeroParamStatus.AVAILABLE is 1: the parameter is gathered, and truly empty.
    is_available = getattr(status, "name", None) == "AVAILABLE" or status == 1
    return None if is_available else _PARTITIONED


def find_hollow(
    modules: Iterable[tuple[str, nn.Module]], live: Mapping[str, object]
) -> dict[str, str]:
    """Return the reasons for hollow tensors, by name. `live` has the tensors of the modules."""
    hollow: dict[str, str] = {}
    for name, tensor in live.items():
        # Almost all parameters have no attributes: this is much faster than to look for each.
        if not isinstance(tensor, nn.Parameter) or not tensor.__dict__:
            continue
        if reason := partition_reason(tensor):
            hollow[name] = reason
    if offloaded := {id(tensor) for tensor in _offloaded(modules)}:
        hollow |= {name: _OFFLOADED for name, tensor in live.items() if id(tensor) in offloaded}
    return hollow


def _offloaded(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[torch.Tensor]:
    """Yield the meta tensors of modules that a hook of accelerate fills before their forward."""
    for _, part in modules:
        if (hook := part.__dict__.get("_hf_hook")) is None:
            continue
        for each in (hook, *getattr(hook, "hooks", ())):
            if getattr(each, "offload", False) and getattr(each, "weights_map", None) is not None:
                recurse = bool(getattr(each, "place_submodules", False))
                tensors = (*part.parameters(recurse), *part.buffers(recurse))
                yield from (tensor for tensor in tensors if tensor.is_meta)
