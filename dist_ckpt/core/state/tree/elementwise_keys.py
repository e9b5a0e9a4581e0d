"""Which keys of an optimizer's state have a value for each element of the parameter. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from dist_ckpt.core.format.geometry import Shape

# The keys of torch's optimizers and of well-known others.
KNOWN_KEYS = frozenset(
    {
        *("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer"),
        *("square_avg", "grad_avg", "acc_delta", "sum", "ax", "prev", "step_size", "variance"),
        *("momentum", "velocity", "hessian", "exp_hessian", "exp_avg_diff", "neg_pre_grad"),
        *("exp_avg_slow", "exp_avg_fast", "z", "s", "p0", "slow_buffer", "cached_params"),
        *("master_param", "master_params", "fp32_param", "ema", "m", "v", "u"),
    }
)


def is_square(shape: Shape) -> bool:
    """Return True for a shape that a preconditioner of the parameter has too."""
    return len(shape) == 2 and shape[0] == shape[1]


def elementwise_keys(shapes: Iterable[tuple[str, Shape, Shape]]) -> dict[str, bool]:
    """Return for each key of the state if it is elementwise; without the keys that may be both.

    `shapes` are the key, the shape of the parameter, and the shape of a tensor under this key.
    """
    outcomes: dict[str, bool] = {}
    for key, parameter, shape in shapes:
        if shape and shape != parameter:
            outcomes[key] = False
        elif shape and not is_square(shape):
            outcomes.setdefault(key, True)
    return {**outcomes, **dict.fromkeys(KNOWN_KEYS, True)}
