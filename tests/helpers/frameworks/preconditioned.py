"""Optimizers with matrices of a parameter's shape that have no value for each of its elements."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor


class Preconditioned(torch.optim.Optimizer):
    """Keeps a matrix for each dimension of a 2-D parameter, as Shampoo does, and a moment.

    `keys` are the names of the matrix, and of the moment.
    """

    def __init__(self, params: Any, lr: float = 0.1, keys: tuple[str, str] = ("L", "exp_avg")):
        super().__init__(params, {"lr": lr})
        self.keys = keys

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Add the gradient's products to the matrix, and the gradient to the moment."""
        for parameter in self.parameters():
            grad, state = parameter.grad, self.state[parameter]
            assert grad is not None
            matrix, moment = self.keys
            whole = grad.full_tensor() if isinstance(grad, DTensor) else grad
            if whole.ndim == 2 and matrix:
                state[matrix] = state.get(matrix, 0) + whole @ whole.mT
            state[moment] = state.get(moment, 0) + grad

    def parameters(self) -> Iterable[torch.Tensor]:
        """Yield the parameters of all groups."""
        return (parameter for group in self.param_groups for parameter in group["params"])
