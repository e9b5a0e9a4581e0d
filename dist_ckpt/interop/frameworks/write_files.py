"""Export a checkpoint as the file or the folder of a framework, which resumes from it itself.

    write_files.export_lightning("runs/a@latest", "a.ckpt")     # Trainer.fit(ckpt_path="a.ckpt")
    write_files.export_accelerate("runs/b@latest", "folder")    # accelerator.load_state("folder")

The checkpoint is one of `LightningCheckpoint` or `AcceleratedRun`, or an import from the framework.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any

from dist_ckpt.core.checkpoint.open_checkpoint import OpenCheckpoint
from dist_ckpt.core.planning.name_selection import Selection, parse_selection
from dist_ckpt.core.state.binding.sources.saved_tree import SavedTree, build_saved_tree
from dist_ckpt.core.state.tensors.plain_torch import make_torch_value
from dist_ckpt.core.storage import open_storage
from dist_ckpt.default_opener import OPENER
from dist_ckpt.errors import IncompatibleError
from dist_ckpt.interop.frameworks.read_lightning import VERSION
from dist_ckpt.interop.readers.nested_state import numbered_name
from dist_ckpt.interop.torch_save.export import TorchState, build_torch_state, plan_state_file
from dist_ckpt.message_text import listed
from dist_ckpt.reports import Progress
from dist_ckpt.tools.new_files import WritePlan, check_no_folder, check_parent, new_folder

_log = logging.getLogger("dist_ckpt")


def export_lightning(
    source: str | os.PathLike[str],
    file: str | os.PathLike[str],
    *,
    exclude: str | Sequence[str] | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> int:
    """Write the checkpoint at `source` as a file of Lightning; return its size in bytes.

    A file cannot have the random generators and the data positions of ranks, nor extra state: they
    are left out, and a warning names them. `exclude` has globs on names in the checkpoint.
    Otherwise as `torch_save.export_file`. IncompatibleError if Lightning has not saved the state.
    """
    return plan_lightning(source, file, exclude=exclude, overwrite=overwrite).run(progress)


def plan_lightning(
    source: str | os.PathLike[str],
    file: str | os.PathLike[str],
    *,
    exclude: str | Sequence[str] | None = None,
    overwrite: bool = False,
) -> WritePlan[int]:
    """Return the plan of `export_lightning`. Raises the errors that it raises before it writes."""
    patterns = [exclude] if isinstance(exclude, str) else [*(exclude or ())]
    return plan_state_file(source, file, partial(_build_lightning, patterns), overwrite=overwrite)


def _build_lightning(exclude: list[str], saved: SavedTree, path: str) -> TorchState:
    names = [name for _, name in saved.children("")]
    is_of_callback = {"model", "optim", "trainer", "position"} <= {*names}
    if not is_of_callback and not {"model", VERSION} <= {*names}:
        raise IncompatibleError(
            f"{path} is neither a checkpoint of LightningCheckpoint nor an import of a file of "
            f"Lightning, so the progress of its loops is unknown. For the weights, export a file "
            f"for torch.load (on the command line --format torch --only model)"
        )
    left_out = []
    if is_of_callback:
        left_out = [name for name in names if name not in ("model", "optim", "trainer")]
        _log.warning("%s: a file of Lightning has no %s: left out", path, listed(left_out))
    selection = parse_selection(None, [*left_out, *exclude] or None)
    state, tensors, not_plain = build_torch_state(saved, path, None, selection)
    assert isinstance(state, dict)
    return (_of_callback if is_of_callback else _of_import)(state), tensors, not_plain


def _of_callback(state: dict[str, Any]) -> dict[str, Any]:
    """Return the contents of a file from the state of `LightningCheckpoint`."""
    trainer = state.get("trainer", {})
    contents = {key: value for key, value in trainer.items() if key != "ended_by"}
    if "model" in state:
        contents["state_dict"] = state["model"]
    if (optim := state.get("optim")) is not None:
        is_one = "param_groups" in optim
        optimizers = [optim] if is_one else [optim[key] for key in sorted(optim, key=int)]
        contents["optimizer_states"] = [*map(number_params, optimizers)]
    return contents


def _of_import(state: dict[str, Any]) -> dict[str, Any]:
    """Return the contents of a file from the state of `from_lightning`."""
    state = dict(state)
    contents = {"state_dict": state.pop("model")} if "model" in state else {}
    optimizers = []
    for number in count():
        if (name := numbered_name("optim", number)) not in state:
            break
        optimizers.append(number_params(state.pop(name)))
    if optimizers:
        contents["optimizer_states"] = optimizers
    return {**state, **contents}


def number_params(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of an optimizer with numbers for its parameters, as of its `state_dict`."""
    numbers: dict[str, int] = {}
    groups = [
        {**group, "params": [numbers.setdefault(name, len(numbers)) for name in group["params"]]}
        for group in optimizer["param_groups"]
    ]
    state = {numbers[name]: values for name, values in optimizer["state"].items()}
    return {**optimizer, "state": state, "param_groups": groups}


# --- accelerate --------------------------------------------------------------------------------

# The files of accelerate, by the component as `AcceleratedRun` or an import names it.
_FILES = {
    "model": "pytorch_model{}.bin",
    "optim": "optimizer{}.bin",
    "scheduler": "scheduler{}.bin",
    "dataloader": "dl_state_dict{}.bin",
    "custom": "custom_checkpoint_{}.pkl",
    "custom_checkpoint": "custom_checkpoint_{}.pkl",
    "scaler": "scaler.pt",
}
_COMPONENT = re.compile(rf"({'|'.join(_FILES)})(?:_(\d+))?")


def export_accelerate(
    source: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    exclude: str | Sequence[str] | None = None,
    progress: Progress | None = None,
) -> int:
    """Write the checkpoint at `source` as a new folder of accelerate; return its size in bytes.

    The random generators, the data positions of ranks and other state are left out, and a warning
    names them. Accelerate continues without them. Otherwise as `export_lightning`.
    """
    return plan_accelerate(source, folder, exclude=exclude).run(progress)


def plan_accelerate(
    source: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    exclude: str | Sequence[str] | None = None,
) -> WritePlan[int]:
    """Return the plan of `export_accelerate`. Raises the errors that it raises before it writes."""
    target, target_path = open_storage(folder)
    check_no_folder(target, target_path)
    check_parent(target_path)
    storage, path = OPENER.find(source)
    opened = OpenCheckpoint.at(storage, path, make=make_torch_value)
    saved = build_saved_tree(opened.catalog, opened.objects(), opened.objects)
    selection = parse_selection(None, exclude)
    files = {
        file: name
        for file, name in _find_files(saved, path).items()
        if any(fqn in selection for fqn in [*saved.below(name)] or [name])
    }
    if not files:
        raise ValueError(f"{selection} leaves nothing: give other patterns")
    builds = {file: partial(_build_component, name, selection) for file, name in files.items()}
    built = {file: build(saved, path)[1] for file, build in builds.items()}
    sizes = {file: sum(tensor.nbytes for tensor in tensors) for file, tensors in built.items()}

    def run(progress: Progress | None) -> int:
        with new_folder(target, target_path) as new:
            plans = (plan_state_file(source, f"{new}/{f}", build) for f, build in builds.items())
            return sum(plan.run(progress) for plan in plans)

    return WritePlan(target_path, run, lambda: sizes)


def _find_files(saved: SavedTree, path: str) -> dict[str, str]:
    """Return the name of the object in each file."""
    files, left_out = {}, []
    for _, name in saved.children(""):
        if (match := _COMPONENT.fullmatch(name)) is None:
            left_out.append(name)
            continue
        objects = {int(match[2] or 0): name}
        if match[1] in ("model", "optim", "scheduler", "custom") and _is_numbered(saved, name):
            objects = {int(key): child for key, child in saved.children(name)}
        for number, fqn in objects.items():
            suffix = str(number) if "custom" in name else f"_{number}" * (number > 0)
            files[_FILES[match[1]].format(suffix)] = fqn
    if not {"position", "rng"} & {*left_out} or "pytorch_model.bin" not in files:
        raise IncompatibleError(
            f"{path} is neither a checkpoint of AcceleratedRun nor an import from accelerate. For "
            f"the weights, export to Hugging Face or torch (on the command line --format hf)"
        )
    _log.warning("%s: a folder of accelerate gets no %s: left out", path, listed(left_out))
    return files


def _is_numbered(saved: SavedTree, name: str) -> bool:
    """Return True if a component of `AcceleratedRun` has several objects, by number."""
    children = {str(key): child for key, child in saved.children(name)}
    # The state of a scheduler is a plain value.
    values = [saved.main.get(saved.leaves[c]) for c in children.values() if c in saved.leaves]
    are_numbers = [*children] == [str(number) for number in range(max(1, len(children)))]
    return are_numbers and all(isinstance(value, dict) for value in values)


def _build_component(name: str, selection: Selection, saved: SavedTree, path: str) -> TorchState:
    state, tensors, not_plain = build_torch_state(saved, path, name, selection)
    if isinstance(state, dict) and name.startswith("optim"):
        state = number_params(state)
    return state, tensors, not_plain
