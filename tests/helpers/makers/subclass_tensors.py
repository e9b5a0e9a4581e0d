"""Tensors that are made of others, in the ways in which libraries make them."""

from __future__ import annotations

from enum import Enum
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map


class Rounding(Enum):
    NEAREST = 1
    STOCHASTIC = 2


class Kernel(NamedTuple):
    fast: bool
    tile: int


class _Made(torch.Tensor):
    """Computes with what `dequantize` returns; `detach` and slices keep the class."""

    names: tuple[str, ...] = ()

    def dequantize(self) -> torch.Tensor:
        raise NotImplementedError

    def cut(self, dim: int, start: int, stop: int) -> Any:
        raise NotImplementedError

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0].renewed({n: getattr(args[0], n).detach() for n in args[0].names})
        if func is torch.ops.aten.slice.Tensor:
            _, dim, start, stop = args
            return args[0].cut(dim, start, min(stop, args[0].shape[dim]))
        # What DTensor does to a local tensor.
        if func is torch.ops.aten.view.default and tuple(args[1]) == tuple(args[0].shape):
            return args[0].renewed({n: getattr(args[0], n) for n in args[0].names})
        whole = [arg.dequantize() if isinstance(arg, _Made) else arg for arg in args]
        return func(*tree_map(_whole, whole), **tree_map(_whole, kwargs or {}))

    def renewed(self, inner: dict[str, torch.Tensor]) -> Any:
        _, context = self.__tensor_flatten__()  # type: ignore[attr-defined]
        return type(self).__tensor_unflatten__(inner, context, None, None)  # type: ignore[attr-defined]


def _whole(value: object) -> object:
    return value.dequantize() if isinstance(value, _Made) else value


class Quantized(_Made):
    """Weights of 8 bits with a scale for each row, as torchao's."""

    names = ("qdata", "scale")
    qdata: torch.Tensor
    scale: torch.Tensor
    block: int
    rounding: Rounding
    kernel: Kernel | None

    @staticmethod
    def __new__(
        cls,
        qdata: torch.Tensor,
        scale: torch.Tensor,
        block: int = 1,
        rounding: Rounding = Rounding.NEAREST,
        kernel: Kernel | None = None,
    ) -> Any:
        made: Any = torch.Tensor._make_wrapper_subclass(
            cls, qdata.shape, dtype=torch.float32, device=qdata.device
        )
        made.qdata, made.scale = qdata, scale
        made.block, made.rounding, made.kernel = block, rounding, kernel
        return made

    @classmethod
    def of(cls, value: torch.Tensor, **context: Any) -> Any:
        scale = value.abs().amax(dim=1, keepdim=True) / 127
        return cls((value / scale).round().to(torch.int8), scale, **context)

    def __tensor_flatten__(self) -> Any:
        context = {"block": self.block, "rounding": self.rounding, "kernel": self.kernel}
        return list(self.names), context

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Any:
        return cls(inner["qdata"], inner["scale"], **context)

    def dequantize(self) -> torch.Tensor:
        whole: torch.Tensor = self.qdata * self.scale
        return whole

    def cut(self, dim: int, start: int, stop: int) -> Any:
        scale = self.scale[start:stop] if dim == 0 else self.scale
        return self.renewed({"qdata": self.qdata.narrow(dim, start, stop - start), "scale": scale})


class Pair(_Made):
    """Two tensors of one shape, each of which may be made of others again."""

    names = ("high", "low")
    high: torch.Tensor
    low: torch.Tensor

    @staticmethod
    def __new__(cls, high: torch.Tensor, low: torch.Tensor) -> Any:
        made: Any = torch.Tensor._make_wrapper_subclass(
            cls, high.shape, dtype=torch.float32, device=high.device
        )
        made.high, made.low = high, low
        return made

    def __tensor_flatten__(self) -> Any:
        return list(self.names), None

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, size: Any, stride: Any) -> Any:
        return Pair(inner["high"], inner["low"])

    def dequantize(self) -> torch.Tensor:
        whole: torch.Tensor = self.high + self.low
        return whole


class GatheredLow(_Made):
    """Holds a tensor as it is, as float8 all-gather does; `scale` is a cache."""

    names = ("whole",)
    whole: torch.Tensor
    scale: torch.Tensor | None

    @staticmethod
    def __new__(cls, whole: torch.Tensor, scale: torch.Tensor | None = None) -> Any:
        made: Any = torch.Tensor._make_wrapper_subclass(
            cls, whole.shape, dtype=whole.dtype, device=whole.device
        )
        made.whole, made.scale = whole, scale
        return made

    def __tensor_flatten__(self) -> Any:
        return ["whole"] + ["scale"] * (self.scale is not None), {"dtype": torch.float8_e4m3fn}

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, size: Any, stride: Any) -> Any:
        return GatheredLow(inner["whole"])

    def dequantize(self) -> torch.Tensor:
        whole: torch.Tensor = self.whole
        return whole

    def cut(self, dim: int, start: int, stop: int) -> Any:
        return GatheredLow(self.whole.narrow(dim, start, stop - start))


class Codes(_Made):
    """Optimizer state of 8 bits: codes, a scale for each block of the row-major ones, a table."""

    names = ("codes", "scale", "table")
    codes: torch.Tensor
    scale: torch.Tensor
    table: torch.Tensor
    signed: bool

    @staticmethod
    def __new__(
        cls, codes: torch.Tensor, scale: torch.Tensor, table: torch.Tensor, signed: bool
    ) -> Any:
        made: Any = torch.Tensor._make_wrapper_subclass(
            cls, codes.shape, dtype=torch.float32, device=codes.device
        )
        made.codes, made.scale, made.table, made.signed = codes, scale, table, signed
        return made

    @classmethod
    def zeros(cls, shape: Any, *, signed: bool, block: int = 4) -> Any:
        codes = torch.zeros(shape, dtype=torch.uint8)
        return cls(codes, torch.zeros(codes.numel() // block), torch.arange(8.0), signed)

    def __tensor_flatten__(self) -> Any:
        return list(self.names), [self.signed]

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Any:
        return cls(*(inner[name] for name in cls.names), *context)

    def dequantize(self) -> torch.Tensor:
        blocks = self.codes.reshape(self.scale.numel(), -1) * self.scale[:, None]
        whole: torch.Tensor = blocks.reshape(self.codes.shape).float()
        return whole

    def cut(self, dim: int, start: int, stop: int) -> Any:
        row, block = self.codes[0].numel(), self.codes.numel() // self.scale.numel()
        if dim or start * row % block or stop * row % block:
            raise ValueError("not at a block")
        inner = {"codes": self.codes[start:stop], "table": self.table.clone()}
        inner["scale"] = self.scale[start * row // block : stop * row // block]
        return self.renewed(inner)


class CodedSGD(torch.optim.Optimizer):
    """SGD whose momentum has 8 bits, as torchao's optimizers keep theirs."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.tensor(0.0)
                    state["momentum"] = self._zeros(parameter)
                state["step"] += 1
                self._update(parameter, state["momentum"], group["lr"])

    def _zeros(self, parameter: torch.Tensor) -> Any:
        made = Codes.zeros(_local(parameter).shape, signed=False)
        if not isinstance(parameter, DTensor):
            return made
        return DTensor.from_local(
            made,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )

    def _update(self, parameter: torch.Tensor, momentum: Any, lr: float) -> None:
        own, grad, momentum = map(_local, (parameter, parameter.grad, momentum))
        value = momentum.dequantize() * 0.5 + grad.abs()
        blocks = value.reshape(momentum.scale.numel(), -1)
        scale = blocks.amax(dim=1) / 255 + 1e-9
        momentum.scale.copy_(scale)
        momentum.codes.copy_((blocks / scale[:, None]).round().reshape(value.shape))
        own.sub_(lr * momentum.dequantize())


def _local(tensor: Any) -> Any:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
