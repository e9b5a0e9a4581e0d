"""What to do with files of other systems that lie where a checkpoint was looked for. Pure."""

from __future__ import annotations

from collections.abc import Set


def hint_for(names: Set[str]) -> str:
    """Say what to do with files that no save of ours has written."""
    if {"model.safetensors", "model.safetensors.index.json"} & names:
        return (
            "They are of Hugging Face: dc.open and dc.load read them, and `dist-ckpt import --from "
            "hf` makes a checkpoint of them"
        )
    if any(name.endswith(".safetensors") for name in names):
        return "Pass one of these files, or add model.safetensors.index.json"
    if any(name.endswith(".distcp") for name in names):
        return (
            "They are of torch.distributed.checkpoint, without the .metadata that its saves write "
            "last: this one did not end. Use another one"
        )
    return "Pass the folder that was given to save"
