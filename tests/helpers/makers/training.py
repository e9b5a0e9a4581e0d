"""One model and its AdamW, cut over ranks in every way; the bits of a tensor follow from its name.

`make(cut, values)` is the state of this rank. Torch cuts the tensors, not we, so that
`difference(loaded, make(cut, SAVED))` compares with something independent.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

import dist_ckpt as dc
from torch_can import cut_unevenly

SAVED, BLANK = "saved", "blank"
MOMENTS = ("exp_avg", "exp_avg_sq")

# How the state is cut, and by how many ranks.
CUTS = {
    "alone": 1,
    "ddp": 2,
    "tp": 2,
    "fsdp": 3,
    "hsdp": 4,
    "fsdp x tp": 4,
    "zero 1, config": 2,
    "zero 3, config": 3,
    "zero 3, FlatShard": 4,
}
if not cut_unevenly():
    del CUTS["fsdp x tp"]


class Block(nn.Module):
    def __init__(self, size: int, hidden: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.up = nn.Linear(size, hidden, dtype=dtype)
        self.down = nn.Linear(hidden, size, dtype=dtype)


class Net(nn.Module):
    """A block that divides evenly, one that never does, and what is replicated under TP."""

    def __init__(self, low: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.even = Block(8, 16, torch.float32)
        self.odd = Block(7, 11, low)
        self.norm = nn.LayerNorm(5)
        self.short = nn.Parameter(torch.empty(1, 2))
        self.register_buffer("table", torch.empty(6))
        self.register_buffer("nothing", torch.empty(0, 3))
        self.register_buffer("count", torch.empty((), dtype=torch.int64))


def bits(name: str, like: torch.Tensor) -> torch.Tensor:
    """Return random bits, NaNs among them, that follow from a name."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    nbytes = like.numel() * like.element_size()
    data = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)
    return data.view(like.dtype).view(like.shape)


def whole(values: str, quantity: str) -> nn.Module:
    """Return the model with all of its values: its own, or a moment's, which are always fp32."""
    model = Net() if quantity == "weight" else Net(torch.float32)
    with torch.no_grad():
        for name, tensor in chain(model.named_parameters(), model.named_buffers()):
            tensor.copy_(bits(f"{values} {quantity} {name}", tensor))
    return model


def cut_model(cut: str, model: nn.Module) -> nn.Module:
    match cut:
        case "ddp":
            return DistributedDataParallel(model)
        case "tp":
            _parallelize(model, mesh(dist.get_world_size()))
        case "fsdp":
            _shard(model, mesh(dist.get_world_size()))
        case "hsdp":
            _shard(model, mesh(2, 2))
        case "fsdp x tp":
            _parallelize(model, mesh(2, 2)["tp"])
            _shard(model, mesh(2, 2)["dp"])
    return model


@cache
def mesh(*sizes: int) -> DeviceMesh:
    return init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp")[: len(sizes)])


def _parallelize(model: nn.Module, mesh: DeviceMesh) -> None:
    plan = {"*.up": ColwiseParallel(), "*.down": RowwiseParallel()}
    parallelize_module(model, mesh, plan, src_data_rank=None)


def _shard(model: Any, mesh: DeviceMesh) -> None:
    for module in (model.even, model.odd, model):
        fully_shard(module, mesh=mesh)


def parameters_of(model: Any) -> dict[str, torch.Tensor]:
    module = model.module if isinstance(model, DistributedDataParallel) else model
    return dict(module.named_parameters())


def adamw(model: nn.Module, lr: float) -> AdamW:
    parameters = parameters_of(model)
    groups: list[dict[str, Any]] = [
        {"params": [p for name, p in parameters.items() if name.endswith("weight")]},
        {"params": [p for name, p in parameters.items() if not name.endswith("weight")]},
    ]
    return AdamW([groups[0], {**groups[1], "weight_decay": 0.0}], lr=lr)


def plain_data(values: str) -> Any:
    if values == BLANK:
        return None
    return {"epoch": 7, "history": [0.5, (1, float("inf"))], "tags": {"a", "b"}, 3: b"three"}


def make(cut: str, values: str) -> dict[str, Any]:
    """Return the state of this rank; the BLANK one is to be loaded into."""
    if cut.startswith("zero 3"):
        return _zero_3(cut, values)
    with warnings.catch_warnings():
        # FSDP2 warns of what it does with buffers, DTensor of how it reads strided shards.
        warnings.simplefilter("ignore")
        model = cut_model(cut, whole(values, "weight"))
        optimizer = adamw(model, 0.125 if values == SAVED else 0.5)
        if values == SAVED:
            moments = {q: parameters_of(cut_model(cut, whole(values, q))) for q in MOMENTS}
            for name, parameter in parameters_of(model).items():
                state = {q: moments[q][name].detach() for q in MOMENTS}
                if cut == "zero 1, config":
                    state = {q: even_part(tensor) for q, tensor in state.items()}
                optimizer.state[parameter] = {"step": torch.tensor(5.0), **state}
    return {"model": model, "optim": optimizer, "data": plain_data(values)}


def sharding_of(cut: str) -> dc.ShardingConfig | None:
    match cut:
        case "zero 1, config":
            return dc.ShardingConfig.zero(CUTS[cut], 1, flat=True)
        case "zero 3, config":
            shapes = {name: tuple(p.shape) for name, p in Net().state_dict().items()}
            return dc.ShardingConfig.zero(CUTS[cut], 3, flat=True, shapes=shapes)
    return None


def even_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's even part of the elements, as `torch.chunk` cuts."""
    parts = tensor.detach().reshape(-1).chunk(dist.get_world_size())
    rank = dist.get_rank()
    return parts[rank].clone() if rank < len(parts) else tensor.new_empty(0)


def _zero_3(cut: str, values: str) -> dict[str, Any]:
    def held(tensor: torch.Tensor) -> Any:
        tensor = tensor.detach()
        if tensor.ndim == 0:
            return tensor.clone()
        if cut == "zero 3, config":
            return even_part(tensor)
        # Uneven, the first rank has nothing.
        rank, last = dist.get_rank(), dist.get_world_size() - 1
        start, stop = (tensor.numel() * r * r // (last * last) for r in (max(rank - 1, 0), rank))
        return dc.FlatShard(tensor.reshape(-1)[start:stop].clone(), tuple(tensor.shape), start)

    quantities = {q: whole(values, q) for q in ("weight", *MOMENTS)}
    model = quantities["weight"].state_dict()
    state: dict[str, Any] = {}
    for name, _ in quantities["weight"].named_parameters():
        entries = {q: held(quantities[q].get_parameter(name)) for q in MOMENTS}
        entries["step"] = torch.tensor(5.0 if values == SAVED else 0.0)
        state[f"model.{name}"] = entries
    groups = adamw(quantities["weight"], 0.125).param_groups if values == SAVED else None
    names = {id(p): f"model.{name}" for name, p in quantities["weight"].named_parameters()}
    for group in groups or []:
        group["params"] = [names[id(p)] for p in group["params"]]
    return {
        "model": {name: held(tensor) for name, tensor in model.items()},
        "optim": {"state": state, "param_groups": groups},
        "data": plain_data(values),
    }


# --- comparing -----------------------------------------------------------------------------------


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield what a state holds on this rank: local tensors, and plain values."""
    match value:
        case DistributedDataParallel():
            yield from leaves(value.module, name)
        case nn.Module():
            yield from leaves(value.state_dict(), name)
        case Optimizer():
            raise TypeError("an optimizer has names only beside its module")
        case dc.FlatShard() | dc.LocalShard():
            yield name, value.tensor
        case DTensor():
            yield name, value.to_local().detach()
        case Mapping() if "model" in value and isinstance(value.get("optim"), Optimizer):
            optimizer = named_state(value["model"], value["optim"])
            yield from leaves({**value, "optim": optimizer}, name)
        case Mapping():
            for key, child in value.items():
                yield from leaves(child, f"{name}.{key}".lstrip("."))
        case _:
            yield name, value


def named_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    names = {id(p): f"model.{name}" for name, p in parameters_of(model).items()}
    groups: list[dict[str, Any]] = [
        {**group, "params": [names[id(p)] for p in group["params"]]}
        for group in optimizer.param_groups
    ]
    state = {names[id(p)]: entries for p, entries in optimizer.state.items()}
    return {"state": state, "param_groups": groups}


def difference(found: Any, expected: Any) -> list[str]:
    """Return the names of what is not the same to the last bit."""
    ours, theirs = dict(leaves(found)), dict(leaves(expected))
    differing = sorted(ours.keys() ^ theirs.keys())
    return differing + [
        name for name in ours.keys() & theirs.keys() if not _same(ours[name], theirs[name])
    ]


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and torch.equal(_as_bytes(a), _as_bytes(b))
    return type(a) is type(b) and a == b


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
