"""What an Accelerator has prepared and registered, by private names of accelerate's."""

from __future__ import annotations

from typing import Any

import accelerate

from dist_ckpt.errors import IncompatibleError
from dist_ckpt.integrations.ddp_buffers import broadcast_inner_buffers

# Each is looked for before anything is saved, as accelerate may move it in any release.
NEEDED = (
    *("_models", "_optimizers", "_schedulers", "_custom_objects", "_dataloaders", "scaler"),
    *("_save_model_state_pre_hook", "_load_model_state_pre_hook", "step", "sync_gradients"),
    *("project_configuration", "ddp_handler"),
)


def held(accelerator: Any) -> dict[str, Any]:
    """Return what was prepared and registered, of each kind one, or several by number."""
    found = {
        "model": _one_or_more(accelerator._models),
        "optim": _one_or_more(accelerator._optimizers),
        "scheduler": _one_or_more(accelerator._schedulers),
        "custom": _one_or_more(accelerator._custom_objects),
        "scaler": accelerator.scaler,
    }
    return {name: value for name, value in found.items() if value is not None}


def _one_or_more(values: list[Any]) -> Any:
    if len(values) <= 1:
        return values[0] if values else None
    return {str(number): value for number, value in enumerate(values)}


def hand_out_buffers_of(accelerator: Any) -> None:
    """Give all ranks rank 0's buffers where DDP does so at each forward. Collective with DDP.

    An Accelerator keeps the models as they were before it put DDP around them.
    """
    is_ddp = _kind_of(accelerator).startswith("MULTI_")
    if not is_ddp or getattr(accelerator, "parallelism_config", None) is not None:
        return
    if accelerator.ddp_handler is None or accelerator.ddp_handler.broadcast_buffers:
        for model in accelerator._models:
            broadcast_inner_buffers(model)


def _kind_of(accelerator: Any) -> str:
    return str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))


def stateful_loaders(accelerator: Any) -> list[Any]:
    """Return the prepared loaders that know where they are."""
    return [
        loader
        for loader in accelerator._dataloaders
        if getattr(loader, "use_stateful_dataloader", False)
    ]


def check(accelerator: Any) -> None:
    """Raise for what is not saved as it should, or not there."""
    if (kind := _kind_of(accelerator)) in ("DEEPSPEED", "MEGATRON_LM", "XLA"):
        raise ValueError(f"{kind} is not saved by this: use accelerate's own save_state")
    if missing := [name for name in NEEDED if not hasattr(accelerator, name)]:
        raise IncompatibleError(
            f"accelerate {accelerate.__version__} has no Accelerator.{missing[0]}: use a version "
            f"that this was tried with (1.15), or dc.Checkpointer in a loop of your own"
        )
