"""Names of adapters of peft: in a live model, and in the `adapter_model.safetensors` of a folder.

    base_model.model.q_proj.lora_A.default.weight   in the model, with the name of the adapter
    base_model.model.q_proj.lora_A.weight           in the file

The rules are those of `get_peft_model_state_dict` in peft/utils/save_and_load.py.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Sequence

from dist_ckpt.core.checkpoint.open_checkpoint import OpenCheckpoint
from dist_ckpt.core.format import strict_json
from dist_ckpt.core.format.index.index import Catalog
from dist_ckpt.core.planning.name_selection import escape_pattern
from dist_ckpt.core.storage import open_storage
from dist_ckpt.default_opener import OPENER
from dist_ckpt.errors import IncompatibleError
from dist_ckpt.interop.readers.model_files import expect_object
from dist_ckpt.interop.readers.virtual_checkpoint import MODEL
from dist_ckpt.interop.registry import read_bytes

_log = logging.getLogger("dist_ckpt")

ADAPTER_FILE = "adapter_model"
_CONFIG = "adapter_config.json"
_MAX_CONFIG_NBYTES = 4 << 20

# The methods of peft whose files have all of an adapter, under names that follow these rules.
_METHODS = {
    *("LORA", "ADALORA", "IA3", "LOHA", "LOKR", "OFT", "BOFT", "HRA", "BONE", "MISS", "C3A"),
    *("VERA", "RANDLORA", "FOURIERFT", "WAVEFT", "ROAD", "DELORA", "GRALORA", "LN_TUNING"),
    *("TRAINABLE_TOKENS", "PROMPT_TUNING", "PREFIX_TUNING", "ADAPTION_PROMPT"),
}
# Parts of the names of their layers.
_LAYER = re.compile(
    r"(lora|ia3|hada|lokr|oft|boft|hra|bone|miss|c3a|vera|randlora|fourierft|waveft|road|delora"
    r"|gralora|ln_tuning)_\w+|trainable_tokens_delta"
)
# Projections that all layers share: peft writes them once, under a name of the whole model.
_SHARED = {"vera_A", "vera_B", "randlora_A", "randlora_B"}
# What a live layer has for an adapter and peft does not write.
_NOT_WRITTEN = {"ranknum", "trainable_tokens_original"}

# A parameter whose name in the file has no "weight", and the name of a prompt in the file.
_MAGNITUDE = "lora_magnitude_vector"
_PROMPT, _LIVE_PROMPT = "prompt_embeddings", "prompt_encoder.{adapter}.embedding.weight"


def adapter_rename(
    folder: str | os.PathLike[str], adapter: str = "default", *, component: str = MODEL
) -> dict[str, str | None]:
    """Return the `rename` with which `dc.load` fills an adapter of a live model of peft.

    `folder` has the adapter: `adapter_model.safetensors` and `adapter_config.json`. `adapter` is
    its name in the model, and `component` the name of the model in the state. IncompatibleError for
    a method of peft whose names are unknown. Otherwise the errors of `dc.open`.
    """
    storage, path = OPENER.find(folder)
    with OpenCheckpoint.at(storage, path) as opened:
        names = [name.removeprefix(f"{MODEL}.") for name in opened.catalog.tensors]
    copied = _copied_modules(path if os.path.isdir(path) else os.path.dirname(path))
    return {
        escape_pattern(f"{MODEL}.{name}"): f"{component}.{live_name(name, adapter, copied)}"
        for name in names
    }


def _copied_modules(folder: str) -> tuple[str, ...]:
    """Return `modules_to_save` of an adapter's config: peft copies these. Check the method."""
    path = f"{folder}/{_CONFIG}"
    data = read_bytes(open_storage(folder)[0], path, _MAX_CONFIG_NBYTES)
    config = expect_object(strict_json.parse(data, path), path)
    if (method := config.get("peft_type", "LORA")) not in _METHODS:
        raise IncompatibleError(
            f"{folder} has an adapter of the method {strict_json.quote(method)}, whose names are "
            f"not known: load it with the model's load_adapter(folder, adapter_name=...)"
        )
    modules = config.get("modules_to_save")
    return tuple(str(name) for name in modules) if isinstance(modules, list) else ()


def live_name(name: str, adapter: str, copied: Sequence[str]) -> str:
    """Return the name in a live model for a name in a file.

    `copied` has the ends of the names of modules that peft copies.
    """
    if name == _PROMPT:
        return _LIVE_PROMPT.format(adapter=adapter)
    above, _, leaf = name.rpartition(".")
    if leaf == _MAGNITUDE:
        return f"{name}.{adapter}.weight"
    if _LAYER.fullmatch(leaf):
        return f"{name}.{adapter}"
    if _LAYER.fullmatch(above.rpartition(".")[2]):
        return f"{above}.{adapter}.{leaf}"
    is_copied = any(f".{above}".endswith(f".{name}") for name in copied)
    return f"{above}.modules_to_save.{adapter}.{leaf}" if is_copied else name


def file_name(name: str, adapter: str) -> str | None:
    """Return the name in a file for a name in a live model; None if it is not of the adapter."""
    if name == _LIVE_PROMPT.format(adapter=adapter):
        return _PROMPT
    above, saved, leaf = name.partition(f".modules_to_save.{adapter}.")
    if saved:
        return f"{above}.{leaf}"
    parts = name.split(".")
    numbers = [n for n, part in enumerate(parts) if _LAYER.fullmatch(part)]
    number = numbers[-1] if numbers else len(parts)
    if parts[number + 1 : number + 2] != [adapter]:
        return None
    kept = parts[: number + 1] + parts[number + 2 :]
    return ".".join(kept[:-1] if parts[number] == _MAGNITUDE else kept)


def select_adapter(
    catalog: Catalog, names: Sequence[str], prefix: str, adapter: str | None
) -> Sequence[str]:
    """Return the names of one adapter; without one all names, and warn if they are of peft.

    ValueError if the adapter has no name, or one that is not known in files. Also for a trained
    parameter that is in no adapter, such as a bias: a file would lack it.
    """
    if adapter is None:
        _warn_of_adapters(names)
        return names
    found = [name for name in names if file_name(name.removeprefix(prefix), adapter) is not None]
    unknown = _find_unknown([name.removeprefix(prefix) for name in names], adapter)
    trained = (n for n in names if catalog.parameters.get(n) and not _is_of_adapter(n))
    if (lacking := unknown or next(trained, None)) is not None:
        raise ValueError(
            f"adapter={adapter!r}: {lacking} has no known name in the files of peft. Load the "
            "model and call its save_pretrained, or exclude it"
        )
    if not found:
        raise ValueError(
            f"adapter={adapter!r}: no name is that of a layer of it: correct the name, or load the "
            "model and call its save_pretrained"
        )
    return found


def _warn_of_adapters(names: Sequence[str]) -> None:
    """Log a warning if names of a model to export whole are those of a live model of peft."""
    if any(".base_layer." in name for name in names):
        _log.warning(
            "the model is one of peft, with base_layer and adapters in its names, so "
            "from_pretrained cannot use the export: export one adapter (adapter='default', on "
            "the command line --adapter default), or save the model after merge_and_unload()"
        )


def _is_of_adapter(name: str) -> bool:
    return any(
        part in ("modules_to_save", "prompt_encoder") or _LAYER.fullmatch(part)
        for part in name.split(".")
    )


def _find_unknown(names: Sequence[str], adapter: str) -> str | None:
    """Return a name of the adapter, by the layer that has it, for which `file_name` has no rule."""
    layers = {"prompt_encoder", *_wrapped_layers(names)}
    for name in names:
        parts = name.split(".")
        is_known = file_name(name, adapter) is not None and not _SHARED & {*parts}
        if adapter not in parts or is_known:
            continue
        number = parts.index(adapter)
        owners = {".".join(parts[:number]), ".".join(parts[: number - 1])}
        if owners & layers and not _NOT_WRITTEN & {*parts}:
            return name
    return None


def _wrapped_layers(names: Sequence[str]) -> Iterator[str]:
    for name in names:
        yield from (name[: match.start()] for match in re.finditer(r"\.base_layer\.", name))
