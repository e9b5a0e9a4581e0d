"""Optimizers around others, built as well-known libraries build them; and torch's own.

None calls torch's constructor, unless it says so: most of those libraries' classes do not.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

with warnings.catch_warnings():
    # Torch compiles functions as it is imported, in a way that it calls deprecated.
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch.distributed.optim import PostLocalSGDOptimizer as PostLocalSGDOptimizer
    from torch.distributed.optim import ZeroRedundancyOptimizer as ZeroRedundancyOptimizer

Closure = Callable[[], Any]


class Delegating(Optimizer):
    """All of it belongs to the one within, as in accelerate's AcceleratedOptimizer."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.loads = 0

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The state within."""
        return self.optimizer.state

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        """The groups within."""
        return self.optimizer.param_groups

    @property
    def defaults(self) -> Any:  # type: ignore[override]
        """The hyperparameters within."""
        return self.optimizer.defaults

    def step(self, closure: Closure | None = None) -> Any:
        """Step within."""
        return self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return what the one within tells."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Hand it on."""
        self.loads += 1
        self.optimizer.load_state_dict(state_dict)


class SlowWeightsWithin(Delegating):
    """A state of its own that stays empty, and slow weights in that within, as timm's Lookahead."""

    def __init__(self, optimizer: Optimizer, k: int = 2) -> None:
        super().__init__(optimizer)
        self.own_state: dict[Any, Any] = defaultdict(dict)
        for group in self.param_groups:
            group.setdefault("lookahead_k", k)
            group.setdefault("lookahead_step", 0)

    @property
    def state(self) -> Any:  # type: ignore[override]
        """What it keeps itself: nothing."""
        return self.own_state

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Any:
        """Step within, and now and then go half way back."""
        loss = self.optimizer.step(closure)
        for group in self.param_groups:
            group["lookahead_step"] += 1
            for p in group["params"] if group["lookahead_step"] % group["lookahead_k"] == 0 else ():
                slow = self.optimizer.state[p].setdefault("slow", p.detach().clone())
                slow.lerp_(p, 0.5)
                p.copy_(slow)
        return loss


class TwoStates(SlowWeightsWithin):
    """Slow weights in its own state, told beside that within, as torch_optimizer's Lookahead."""

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Any:
        """Step within, and go half way back."""
        loss = self.optimizer.step(closure)
        for p in (p for group in self.param_groups for p in group["params"]):
            slow = self.own_state[p].setdefault("slow", p.detach().clone())
            slow.lerp_(p, 0.5)
            p.copy_(slow)
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return both states, by the parameters' numbers."""
        within = self.optimizer.state_dict()
        numbers = {p: n for n, p in enumerate(self._parameters())}
        slow = {numbers[p]: entries for p, entries in self.own_state.items()}
        return {
            "fast_state": within["state"],
            "slow_state": slow,
            "param_groups": within["param_groups"],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take both states."""
        within = {"state": state_dict["fast_state"], "param_groups": state_dict["param_groups"]}
        self.optimizer.load_state_dict(within)
        parameters = list(self._parameters())
        self.own_state.clear()
        self.own_state.update(
            (parameters[n], dict(entries)) for n, entries in state_dict["slow_state"].items()
        )

    def _parameters(self) -> Any:
        return (p for group in self.param_groups for p in group["params"])


class TupleKeys(TwoStates):
    """Slow weights told under pairs of numbers, as by pytorch_optimizer's Lookahead."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state within, and the slow weights by group and number."""
        slow = {
            (g, n): dict(self.own_state[p])
            for g, group in enumerate(self.param_groups)
            for n, p in enumerate(group["params"])
        }
        return {"lookahead_state": slow, "base_optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take both."""
        self.optimizer.load_state_dict(state_dict["base_optimizer"])
        for (g, n), entries in state_dict["lookahead_state"].items():
            self.own_state[self.param_groups[g]["params"][n]] = dict(entries)


class Untold(Optimizer):
    """The one within has a state of which nothing is told, as in the SAM that most people copy.

    Calls torch's constructor.
    """

    def __init__(self, params: Any, base: Callable[..., Optimizer], **kwargs: Any) -> None:
        super().__init__(params, {"rho": 0.05, **kwargs})
        self.base_optimizer = base(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups
        self.defaults.update(self.base_optimizer.defaults)

    def step(self, closure: Closure | None = None) -> Any:
        """Step within."""
        return self.base_optimizer.step(closure)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Share the groups again, which torch has made anew."""
        super().load_state_dict(state_dict)
        self.base_optimizer.param_groups = self.param_groups


class Counting(torch.optim.AdamW):
    """A subclass that adds to what is told."""

    skipped = 0

    def state_dict(self) -> dict[str, Any]:
        """Return torch's, and how many steps were skipped."""
        return {**super().state_dict(), "skipped": self.skipped}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take both."""
        self.skipped = state_dict.pop("skipped")
        super().load_state_dict(state_dict)


class FP16Optimizer:
    """No torch optimizer, but an object with a state dict, as apex' and DeepSpeed's are."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.masters = [
            [p.detach().float().clone() for p in group["params"]]
            for group in optimizer.param_groups
        ]
        self.loss_scale = 2.0**16

    def state_dict(self) -> dict[str, Any]:
        """Return the state within, the master weights and the scale."""
        return {
            "optimizer_state_dict": self.optimizer.state_dict(),
            "fp32_from_fp16": self.masters,
            "loss_scale": self.loss_scale,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take all of it."""
        self.optimizer.load_state_dict(state_dict["optimizer_state_dict"])
        self.loss_scale = state_dict["loss_scale"]
        for own, saved in zip(self.masters, state_dict["fp32_from_fp16"], strict=True):
            for master, value in zip(own, saved, strict=True):
                master.copy_(value)
