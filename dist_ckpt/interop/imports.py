"""Import checkpoints of other systems: DCP, torch.save, Hugging Face, and frameworks.

    imports.from_dcp("old/step-100", "runs/a/step-00000100", step=100, world_size=8)
    imports.from_torch("old.pt", "runs/b/step-00000100", step=100)
    imports.from_hf("old-model", "model")
    imports.from_lightning("epoch=3.ckpt", "runs/c/step-00000100")
    imports.from_accelerate("checkpoint_5", "runs/d/step-00000100", step=100)
    imports.from_deepspeed("out/global_step100", "runs/e/step-00000100")
    imports.from_megatron("out/iter_0000100", "runs/f/step-00000100")

One process imports, without torch, in bounded memory. Only a tensor that is transposed in its file
needs twice its size. Nothing in a file is executed: pickles are read without unpickling, as plain
data.

Each function takes `ImportOptions`. On return the checkpoint is complete and durable. Raises
NotFoundError for missing files, CorruptError for damaged ones, IncompatibleError for selected
values that are not plain data, and the errors of `dc.reshard`. The checksums of torch.save are
checked. `num_unchecked` of the report counts the tensors that have none.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypedDict, Unpack

from dist_ckpt.core.commit.attempts import list_attempts
from dist_ckpt.core.format.index.index import MAX_STEP
from dist_ckpt.core.planning.name_selection import Selection, parse_selection
from dist_ckpt.core.runtime.arguments import check_flag
from dist_ckpt.core.storage import Storage, open_storage
from dist_ckpt.errors import IncompatibleError, NotFoundError
from dist_ckpt.interop.readers.nested_state import ImportFilter
from dist_ckpt.interop.readers.virtual_checkpoint import (
    ForeignTensor,
    StateConversion,
    build_virtual_checkpoint,
)
from dist_ckpt.interop.registry import (
    DCP_METADATA,
    FORMATS,
    HF_FILE,
    HF_INDEX,
    ForeignFormatError,
    is_file,
    is_shrew_file,
    open_foreign,
    open_foreign_file,
    reader_module,
)
from dist_ckpt.reports import Progress, SaveReport
from dist_ckpt.tools.new_files import WritePlan
from dist_ckpt.tools.rewrite.reshard import even_sharding, plan_rewrite

__all__ = [
    "ImportOptions",
    "from_accelerate",
    "from_dcp",
    "from_deepspeed",
    "from_hf",
    "from_lightning",
    "from_megatron",
    "from_torch",
]

StrPath = str | os.PathLike[str]

# The memory for tensors; more is not faster.
_MAX_MEMORY = 256 << 20


class ImportOptions(TypedDict, total=False):
    """The options of an import.

    Tensors are split evenly for `world_size` ranks, by default 1. `step` is the step of the
    checkpoint, by default the one in the files. `include` and `exclude` are globs on the names in
    the new checkpoint. Excluded values are not read, so they may be of any type. `overwrite`
    replaces an existing checkpoint once the new one is durable. With `dequantize`, 8-bit weights
    become float32, multiplied by their scales, which are left out: see `dc.load`. This needs torch.
    """

    world_size: int
    step: int | None
    include: str | Sequence[str] | None
    exclude: str | Sequence[str] | None
    overwrite: bool
    dequantize: bool
    progress: Progress | None


def from_dcp(source: StrPath, target: StrPath, **options: Unpack[ImportOptions]) -> SaveReport:
    """Make the checkpoint at `target` from a folder of `torch.distributed.checkpoint`.

    Names are those that `dc.save` would use for the nested state.
    """
    return _import("dcp", source, target, options)


def from_torch(source: StrPath, target: StrPath, **options: Unpack[ImportOptions]) -> SaveReport:
    """Make the checkpoint at `target` from a file of `torch.save`.

    The file has a dict of tensors and plain data, nested in any way. A dict of only tensors, such
    as a model's `state_dict()`, becomes `{"model": ...}`. Tied tensors stay tied.
    """
    return _import("torch", source, target, options)


def from_hf(source: StrPath, target: StrPath, **options: Unpack[ImportOptions]) -> SaveReport:
    """Make the checkpoint at `target` from a safetensors file, or a Hugging Face folder of them.

    Its state is `{"model": ...}`.
    """
    return _import("hf", source, target, options)


def from_lightning(
    source: StrPath, target: StrPath, **options: Unpack[ImportOptions]
) -> SaveReport:
    """Make the checkpoint at `target` from one of Lightning, with its `global_step` as the step.

    The LightningModule is `model`, the first optimizer `optim`, the next `optim_1`. Everything else
    keeps its name, such as `lr_schedulers`, `loops`, `callbacks`, `hyper_parameters`.
    """
    return _import("lightning", source, target, options)


def from_accelerate(
    source: StrPath, target: StrPath, **options: Unpack[ImportOptions]
) -> SaveReport:
    """Make the checkpoint at `target` from a folder of accelerate's `save_state`.

    The first model is `model`, the next `model_1`. The same holds for `optim`, `scheduler`,
    `sampler`, `dataloader`, `custom_checkpoint` and `scaler`. `rng` has the generators of each
    rank, for a `dc.RNG`. On several GPUs, the rank's generator is that of the GPU of its number.
    """
    return _import("accelerate", source, target, options)


def from_deepspeed(
    source: StrPath, target: StrPath, **options: Unpack[ImportOptions]
) -> SaveReport:
    """Make the checkpoint at `target` from a folder of DeepSpeed, with its `global_steps`.

    With any stage of ZeRO, `model` has the whole fp32 master weights, and buffers and frozen
    parameters unchanged. `optim` has the state by parameter names. The vectors of all ranks are
    read in place.
    """
    return _import("deepspeed", source, target, options)


def from_megatron(source: StrPath, target: StrPath, **options: Unpack[ImportOptions]) -> SaveReport:
    """Make the checkpoint at `target` from a torch_dist folder of Megatron, with its `iteration`.

    Tensors keep the names of their sharded tensors, below `model` or `optim`. Layers of one shape
    are one tensor, whose first dimension is the layer. Objects of ranks are below `objects`.
    """
    return _import("megatron", source, target, options)


def detect_format(source: StrPath) -> str:
    """Return the format of the files at `source`, as for `dist-ckpt import --from`.

    IncompatibleError for unknown files, and for a checkpoint of dist_ckpt. NotFoundError if nothing
    exists there. Also raises the errors of damaged and missing files.
    """
    storage, path = open_storage(source)
    if is_shrew_file(storage, path):
        return "shrew"
    try:
        if open_foreign(storage, path) is not None:
            if is_file(storage, os.path.join(path, DCP_METADATA)):
                raise IncompatibleError(
                    f"{path} has the files of DCP, and those of a Hugging Face model: name the "
                    f"format with --from: dcp, or hf"
                )
            return "hf"
    except ForeignFormatError as error:
        if error.format_name in ("lightning", "torch") and os.path.isfile(path):
            detected: str = reader_module("frameworks.read_lightning").detect_format(storage, path)
            return detected
        return error.format_name
    if not os.path.exists(path):
        raise NotFoundError(f"{path}: the path does not exist; check it")
    if any(list_attempts(storage, path)):
        raise IncompatibleError(
            f"{path} is a checkpoint of dist_ckpt, which needs no import: dc.load reads it, and "
            f"`dist-ckpt cp` copies it"
        )
    if not os.path.isdir(path):  # such as a file that this user may not read
        open_foreign_file(storage, path).close()
    raise IncompatibleError(
        f"{path} has the files of no known format: give the folder or file of one checkpoint, or "
        f"name the format with --from: {', '.join((*FORMATS, 'hf', 'shrew'))}"
    )


def plan_import(
    format_name: str, source: StrPath, target: StrPath, options: ImportOptions
) -> WritePlan[SaveReport]:
    """Return the plan of `from_dcp`, or of the import of another format.

    Raises the errors that the import raises before it writes.
    """
    if unknown := sorted(options.keys() - ImportOptions.__annotations__.keys()):
        raise TypeError(f"{unknown[0]!r} is not an option of an import: see ImportOptions")
    step = options.get("step")
    if step is not None and (type(step) is not int or not 0 <= step <= MAX_STEP):
        raise ValueError(f"step={step!r}: give None or an integer from 0 to {MAX_STEP}")
    include, exclude = options.get("include"), options.get("exclude")
    dequantizes = options.get("dequantize", False)
    check_flag("dequantize", dequantizes)
    num_unchecked = 0
    if format_name == "hf":
        selection = parse_selection(include, exclude)
        opened = _open_safetensors(source, selection if dequantizes else None)
    else:
        selection = parse_selection(include, None)
        wanted = ImportFilter(parse_selection(None, exclude), selection.__contains__)
        opened, tensors = open_pickled(
            format_name, source, wanted, checks_records=True, dequantizes=dequantizes
        )
        num_unchecked = sum(
            tensor.fqn in selection and not tensor.has_checksums for tensor in tensors
        )
    plan = plan_rewrite(
        opened,
        target,
        even_sharding(options.get("world_size", 1)),
        max_memory=_MAX_MEMORY,
        step=step,
        overwrite=options.get("overwrite", False),
        selection=selection,
    )

    def run(progress: Progress | None) -> SaveReport:
        return replace(plan.run(progress), num_unchecked=num_unchecked)

    return replace(plan, run=run)


def _import(
    format_name: str, source: StrPath, target: StrPath, options: ImportOptions
) -> SaveReport:
    return plan_import(format_name, source, target, options).run(options.get("progress"))


def open_pickled(
    format_name: str,
    path: StrPath,
    import_filter: ImportFilter,
    *,
    checks_records: bool,
    dequantizes: bool = False,
) -> tuple[tuple[Storage, str], Sequence[ForeignTensor]]:
    """Return a storage that presents the files of a format as a checkpoint, and its path.

    Also return its tensors. `checks_records` is that of `build_virtual_checkpoint`.
    """
    storage, text = open_storage(path)
    foreign_format = FORMATS[format_name]
    state = reader_module(foreign_format.reader).read(storage, text, import_filter)
    if dequantizes:
        state = _dequantization(storage, import_filter.needs)(state)
    opened = build_virtual_checkpoint(
        storage, text, state, foreign_format.name, checks_records=checks_records
    )
    return (opened, text), state.tensors


def _dequantization(storage: Storage, selected: Callable[[str], bool]) -> StateConversion:
    from dist_ckpt.interop.readers.dequantized_state import dequantize  # noqa: PLC0415  (only rare imports need it)

    return partial(dequantize, storage, selected)


def _open_safetensors(path: StrPath, dequantized: Selection | None) -> tuple[Storage, str]:
    """Return a storage that presents safetensors files as a checkpoint, and its path.

    The selected 8-bit weights are `dequantized`; None for none.
    """
    storage, text = open_storage(path)
    convert = None if dequantized is None else _dequantization(storage, dequantized.__contains__)
    if (files := open_foreign(storage, text, convert)) is None:
        if not os.path.exists(text):
            raise NotFoundError(f"{text}: the path does not exist; check it")
        raise IncompatibleError(
            f"{text} is neither a safetensors file nor a folder of them with "
            f"{HF_INDEX} or {HF_FILE}; check the path"
        )
    return files, text
