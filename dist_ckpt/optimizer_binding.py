"""Optimizers on the loading side: state and groups are assigned directly.

`Optimizer.load_state_dict` is never called: it casts state to the parameter's dtype.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from dist_ckpt.asks import Asks, Contents, Get
from dist_ckpt.containers import PathKey, entries_of, join
from dist_ckpt.optimizers import LOCAL_KEYS, ParameterName
from dist_ckpt.region import Shape
from dist_ckpt.state_tree import Branch, OptimizerLeaf, PlainLeaf, TensorLeaf, Tree, read_value
from dist_ckpt.optimizers import state_branch
from dist_ckpt.wants import Beside


def bind_optimizer(
    asks: Asks, fqn: str, leaf: OptimizerLeaf, names: Mapping[int, ParameterName], *, strict: bool
) -> None:
    """Ask for an optimizer's state and groups. Optimizers are closed.

    State that the checkpoint has and memory lacks is made; state in memory that the checkpoint
    lacks is missing.
    """
    optimizer = leaf.optimizer
    asks.split(join(fqn, "param_groups"))
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            _bind_state(asks, fqn, leaf, group, parameter, names[id(parameter)])
        _bind_group(asks, join(join(fqn, "param_groups"), number), group)
    _check_groups(asks, fqn, optimizer.param_groups, names, strict=strict)
