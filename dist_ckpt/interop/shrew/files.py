"""`.shrew` files, version 1 and 2: read into a state, written from one, made into checkpoints.

    state = shrew.read("training.shrew")     # {"model": {name: Array}, "optim": ..., "epoch": ...}
    data = shrew.write(state)                # the same bytes
    shrew.import_file("training.shrew", "runs/a/step-00000500")
    shrew.export_file("runs/a@latest", "training.shrew")

A file of version 1 is `{"model": {name: tensor}}`. One of version 2 has `"epoch"`, `"global_step"`,
`"best_loss"` and `"loss_history"` besides, and maybe `"optim"`: `{"type": str, "scalars": {name:
float}, "buffers": {name: float64 tensor of one dimension}}`. Names and their order are kept.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager

from dist_ckpt.core.checkpoint.checkpoint import Checkpoint, StoredTensor
from dist_ckpt.core.checkpoint.checkpoint import open as open_checkpoint
from dist_ckpt.core.commit.new_files import check_new_file, check_outside, new_file
from dist_ckpt.core.format.checksums import Buffer
from dist_ckpt.core.format.index.index import MAX_STEP
from dist_ckpt.core.format.objects.plain_types import ArrayValue
from dist_ckpt.core.planning.selection import Selection, selection_of
from dist_ckpt.core.shard_io.memory.host_array import Array
from dist_ckpt.core.storage import real_path
from dist_ckpt.interop.shrew import encoding
from dist_ckpt.interop.writers.local_files import FileSource, LocalFile
from dist_ckpt.interop.writers.plain_states import FileTensor, PlainTensor, described, is_tensor
from dist_ckpt.interop.writers.single_process_save import (
    plan_single_process_save,
)
from dist_ckpt.openers import OPENER
from dist_ckpt.reports import CopyProgress, Progress, SaveReport
from dist_ckpt.tools.rewrite.write_plan import WritePlan, plan_of_file

__all__ = ["export_file", "import_file", "read", "write"]


def read(source: str | os.PathLike[str] | Buffer) -> dict[str, object]:
    """Return what a `.shrew` file, or its bytes, hold: dicts of tensors and plain values.

    A tensor is an `Array`, as `dc.open` gives them: a copy, with its bytes in `.data`. Nothing is
    allocated that the file is too short for. Errors say at which byte what was found: CorruptError
    for what is no whole `.shrew` file, also if something follows its end, IncompatibleError for
    other versions, unknown dtypes and what no checkpoint can hold.
    """
    if isinstance(source, str | os.PathLike):
        with closing(LocalFile(source)) as file:
            return _with_data(encoding.parse(file, file.path), file.read)
    try:
        data = memoryview(source).cast("B")
    except TypeError:
        raise TypeError(
            f"the source is a {type(source).__name__}: give the path of a .shrew file, or its bytes"
        ) from None
    with data as view:
        memory = _FileInMemory(view)
        return _with_data(encoding.parse(memory, "the .shrew bytes"), memory.read)


def write(state: Mapping[str, object], *, version: int | None = None) -> bytes:
    """Return a state as the bytes of a `.shrew` file: of what `read` returned, the same bytes.

    Tensors may be `Array`s, torch tensors or numpy arrays. `version` 1 takes the model alone; None
    is 1 for a state that is only a model, else 2. Raises IncompatibleError for what such a file
    cannot hold, with all names and what to do; ValueError for another version.
    """
    if not isinstance(state, Mapping):
        raise TypeError(
            f"the state is a {type(state).__name__}: give a dict, {{'model': {{name: tensor}}}}"
        )
    number = encoding.version_for(state, version)
    known = {name: _as_arrays(value, name) for name, value in state.items()}
    return b"".join(encoding.encode(known, number, _data_of))


def import_file(
    file: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> SaveReport:
    """Make the checkpoint at `target` of a `.shrew` file, in one process and without torch.

    It is what `dc.save(shrew.read(file), target)` would make if it took `Array`s; its step is the
    global step of a file of version 2. The file's data is read as it is written, some MiB at a
    time. On return the checkpoint is complete and durable; `overwrite` replaces the one that is
    there once it is. Raises what `read` does, before anything is written, and what `dc.save` does.
    """
    return plan_import_file(file, target, overwrite=overwrite).run(progress=progress)


def plan_import_file(
    file: str | os.PathLike[str], target: str | os.PathLike[str], *, overwrite: bool = False
) -> WritePlan[SaveReport]:
    """Return the plan of `import_file`. Raises the errors that it raises before it writes."""
    with closing(LocalFile(file)) as source:
        state, version = encoding.parse(source, source.path), source.version

    @contextmanager
    def open_data(progress: Progress | None) -> Iterator[Callable[[PlainTensor], FileSource]]:
        with closing(LocalFile(file)) as source:
            source.check_unchanged(version)
            tell = CopyProgress(source.nbytes, progress)

            def source_of(tensor: PlainTensor) -> FileSource:
                assert isinstance(tensor, FileTensor)
                return FileSource(source, tensor, tell)

            yield source_of

    step = state.get("global_step")
    return plan_single_process_save(
        described(state),
        target,
        open_data,
        step=step if isinstance(step, int) and step <= MAX_STEP else None,
        overwrite=overwrite,
        imported_from="shrew",
    )


def export_file(  # noqa: PLR0913 - a front door
    source: str | os.PathLike[str],
    file: str | os.PathLike[str],
    *,
    version: int | None = None,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> int:
    """Write the checkpoint at `source` as a `.shrew` file; return the file's size in bytes.

    `source` may name one of a run, such as "runs/a@latest"; however it was sharded, tensors are
    written whole, one in memory at a time. `version` is as for `write`; `include` and `exclude` are
    globs on names in the checkpoint. On return the file is durable; until then it has another name,
    and if this raises there is none. Raises
    IncompatibleError for what such a file cannot hold, ExistsError without `overwrite` if something
    is there, and what `dc.open` and reading raise.
    """
    plan = plan_export_file(
        source, file, version=version, include=include, exclude=exclude, overwrite=overwrite
    )
    return plan.run(progress=progress)


def plan_export_file(
    source: str | os.PathLike[str],
    file: str | os.PathLike[str],
    *,
    version: int | None = None,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    overwrite: bool = False,
) -> WritePlan[int]:
    """Return the plan of `export_file`. Raises the errors that it raises before it writes."""
    checkpoint = open_checkpoint(source, opener=OPENER)
    path = check_new_file(file, overwrite=overwrite)
    check_outside(real_path(checkpoint.path), real_path(path))
    state = _state_of(checkpoint, selection_of(include, exclude))
    number = encoding.version_for(state, version)
    nbytes = _nbytes_of(state, number)

    def run(progress: Progress | None) -> int:
        tell = CopyProgress(nbytes, progress)
        with checkpoint, new_file(file, overwrite=overwrite, nbytes=nbytes) as out:
            for part in encoding.encode(state, number, _data_of):
                tell(out.write(part))
        return nbytes

    return plan_of_file(path, run, nbytes)


def _nbytes_of(state: Mapping[str, object], version: int) -> int:
    """Return how large a file becomes, from which no tensor is read."""
    nbytes = 0

    def none_of(tensor: PlainTensor) -> bytes:
        nonlocal nbytes
        nbytes += tensor.nbytes
        return b""

    parts = encoding.encode(state, version, none_of)
    return sum(memoryview(part).nbytes for part in parts) + nbytes


# As deep lies what a file has: in "optim" in "buffers".
_MAX_DEPTH = 3


class _FileInMemory:
    """Bytes in memory, as a file."""

    def __init__(self, view: memoryview) -> None:
        self._view = view

    @property
    def nbytes(self) -> int:
        return self._view.nbytes

    def read(self, offset: int, nbytes: int) -> bytes:
        return bytes(self._view[offset : offset + nbytes])


def _with_data(value: object, read_at: Callable[[int, int], bytes]) -> dict[str, object]:
    """Return a state with the data of its tensors."""

    def filled(value: object) -> object:
        if isinstance(value, FileTensor):
            data = memoryview(bytearray(read_at(value.start, value.nbytes)))
            return Array(value.dtype, value.shape, data)
        if isinstance(value, dict):
            return {name: filled(child) for name, child in value.items()}
        return value

    state = filled(value)
    assert isinstance(state, dict)
    return state


def _as_arrays(value: object, fqn: str, *, depth: int = 1) -> object:
    """Return a value with `Array`s in place of torch's and numpy's tensors."""
    if isinstance(value, Mapping):
        if depth == _MAX_DEPTH:  # what lies deeper is refused, whatever it is
            return value
        return {
            key: _as_arrays(child, f"{fqn}.{key}", depth=depth + 1) for key, child in value.items()
        }
    if is_tensor(value):
        return value
    if not hasattr(value, "dtype"):
        return value
    from dist_ckpt.core.state.tensors.plain_torch import without_tensors  # noqa: PLC0415  (who has such tensors)

    made = without_tensors(value, fqn)
    return (
        Array(made.dtype, made.shape, memoryview(made.data)) if type(made) is ArrayValue else made
    )


def _data_of(tensor: PlainTensor) -> Buffer:
    array = tensor[...] if isinstance(tensor, StoredTensor) else tensor
    assert isinstance(array, Array)
    return array.data


def _state_of(checkpoint: Checkpoint, selection: Selection) -> dict[str, object]:
    """Return what a checkpoint holds as `encode` takes it: what is no part of that is named whole.

    The tensors of a model go by their names, however deep in it they lie.
    """
    model: dict[str, object] = {}
    buffers: dict[str, object] = {}
    state: dict[str, object] = {}
    optimizer: dict[str, object] = {}
    places = {"model.": model, "optim.buffers.": buffers, "optim.": optimizer, "": state}

    def put(fqn: str, value: object) -> None:
        if fqn not in selection:
            return
        prefix = next(prefix for prefix in places if fqn.startswith(prefix))
        places[prefix][fqn.removeprefix(prefix)] = value

    for fqn in checkpoint:
        put(fqn, checkpoint[fqn])
    for fqn, value in checkpoint.objects.items():
        put(fqn, value)
    for fqn in checkpoint.per_rank:
        put(fqn, "a value of each rank")
    if problems := selection.unmatched((*checkpoint, *checkpoint.objects, *checkpoint.per_rank)):
        raise ValueError("; ".join(problems))
    if buffers:
        optimizer["buffers"] = buffers
    if model:
        state["model"] = model
    if optimizer:
        state["optim"] = optimizer
    return state
