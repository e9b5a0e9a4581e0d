"""What `self.log` of a Lightning module has logged, as metrics of a step."""

from __future__ import annotations

import math
from typing import Any

import torch


def logged(trainer: Any) -> dict[str, float]:
    """Return what the loop that runs has logged, as numbers; nothing of other loops, or before."""
    values = trainer._logger_connector.metrics["callback"] if trainer._results is not None else {}
    found = {name: _number(value) for name, value in values.items()}
    return {name: value for name, value in found.items() if value is not None}


def _number(value: Any) -> float | None:
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            return None
        value = value.item()
    if isinstance(value, int | float) and math.isfinite(value):
        return float(value)
    return None
