"""`.shrew` files, version 1 and 2: read, write, import as checkpoints, and export from them.

    state = shrew.read("training.shrew")     # {"model": {name: Array}, "optim": ..., "epoch": ...}
    data = shrew.write(state)                # the same bytes
    shrew.import_file("training.shrew", "runs/a/step-00000500")
    shrew.export_file("runs/a@latest", "training.shrew")

A file of version 1 is `{"model": {name: tensor}}`. Version 2 adds `"epoch"`, `"global_step"`,
`"best_loss"` and `"loss_history"`, and optionally `"optim"`: `{"type": str, "scalars": {name:
float}, "buffers": {name: float64 tensor of one dimension}}`. Names keep their order.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence
from contextlib import closing

from dist_ckpt.core.checkpoint.checkpoint import Checkpoint, StoredTensor
from dist_ckpt.core.checkpoint.checkpoint import open as open_checkpoint
from dist_ckpt.core.format.checksums import Buffer
from dist_ckpt.core.format.geometry import Region
from dist_ckpt.core.format.index.index import MAX_STEP, Node
from dist_ckpt.core.format.objects.plain_types import ArrayValue
from dist_ckpt.core.planning.name_selection import Selection, parse_selection
from dist_ckpt.core.shard_io.memory.host_array import Array
from dist_ckpt.core.state.tree.containers import child_name
from dist_ckpt.core.storage import ReadableFile, Storage, open_storage, real_path
from dist_ckpt.core.storage.overlay_storage import BytesFile
from dist_ckpt.core.storage.storage_wrappers import ForwardingStorage
from dist_ckpt.default_opener import OPENER
from dist_ckpt.errors import CorruptError, NotFoundError, StorageError
from dist_ckpt.interop.readers.virtual_checkpoint import (
    ForeignChunk,
    ForeignState,
    ForeignTensor,
    build_virtual_checkpoint,
)
from dist_ckpt.interop.registry import check_fetched
from dist_ckpt.interop.shrew import encoding
from dist_ckpt.interop.shrew.encoding import FileTensor, PlainTensor, is_tensor
from dist_ckpt.reports import CopyProgress, Progress, SaveReport
from dist_ckpt.tools.new_files import (
    WritePlan,
    check_new_file,
    check_outside,
    checked_file_path,
    new_file,
    plan_file_export,
)
from dist_ckpt.tools.rewrite.reshard import MIN_MEMORY, even_sharding, plan_rewrite

__all__ = ["export_file", "import_file", "read", "write"]


def read(source: str | os.PathLike[str] | Buffer) -> dict[str, object]:
    """Return the state in a `.shrew` file, or in its bytes: dicts of tensors and plain values.

    A tensor is an `Array`, as in `dc.open`: a copy, with its bytes in `.data`. Memory is bounded by
    the size of the file. Errors give the byte: CorruptError for an incomplete or damaged file, or
    bytes after its end; IncompatibleError for other versions, unknown dtypes, and values that a
    checkpoint cannot store.
    """
    if isinstance(source, str | os.PathLike):
        with closing(LocalFile(source)) as file:
            return _read_tensors(encoding.parse(file, file.path), file)
    try:
        data = memoryview(source).cast("B")
    except TypeError:
        raise TypeError(
            f"the source is a {type(source).__name__}: give the path of a .shrew file, or its bytes"
        ) from None
    with data, closing(BytesFile(data)) as memory:
        return _read_tensors(encoding.parse(memory, "the .shrew bytes"), memory)


def write(state: Mapping[str, object], *, version: int | None = None) -> bytes:
    """Return a state as the bytes of a `.shrew` file. A state from `read` gives the same bytes.

    Tensors may be `Array`s, torch tensors or numpy arrays. `version` 1 writes only the model; None
    is 1 for a state that is only a model, else 2. IncompatibleError names everything that such a
    file cannot store, with remedies. ValueError for another version.
    """
    if not isinstance(state, Mapping):
        raise TypeError(
            f"the state is a {type(state).__name__}: give a dict, {{'model': {{name: tensor}}}}"
        )
    number = encoding.choose_version(state, version)
    arrays = {name: _as_arrays(value, name) for name, value in state.items()}
    return b"".join(encoding.encode(arrays, number, _read_data))


def import_file(
    file: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> SaveReport:
    """Make the checkpoint at `target` from a `.shrew` file, in one process and without torch.

    Its files are those of `dc.save(shrew.read(file), target)` if that accepted `Array`s. Its step
    is the global step of a file of version 2. The file's data is read some MiB at a time. On return
    the checkpoint is complete and durable. `overwrite` replaces an existing checkpoint after that.
    Raises the errors of `read` before anything is written, and those of `dc.save`.
    """
    return plan_import_file(file, target, overwrite=overwrite).run(progress)


def plan_import_file(
    file: str | os.PathLike[str], target: str | os.PathLike[str], *, overwrite: bool = False
) -> WritePlan[SaveReport]:
    """Return the plan of `import_file`. Raises the errors that it raises before it writes."""
    with closing(LocalFile(file)) as source:
        state = _build_foreign_state(encoding.parse(source, source.path), source.path)
        storage = UnchangedFile(open_storage(source.path)[0], source.version)
    virtual = build_virtual_checkpoint(storage, source.path, state, "a .shrew file")
    return plan_rewrite(
        (virtual, source.path), target, even_sharding(1), max_memory=MIN_MEMORY, overwrite=overwrite
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

    `source` may be a selector of a run, such as "runs/a@latest". Tensors of any layout are written
    whole, one in memory at a time. `version` is that of `write`. `include` and `exclude` are globs
    on names in the checkpoint. On return the file is durable. Until then it has another name, and
    after an error it does not exist. IncompatibleError for values that such a file cannot store,
    ExistsError without `overwrite` if something exists there; otherwise the errors of `dc.open` and
    of reading.
    """
    plan = plan_export_file(
        source, file, version=version, include=include, exclude=exclude, overwrite=overwrite
    )
    return plan.run(progress)


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
    state = _read_state(checkpoint, parse_selection(include, exclude))
    number = encoding.choose_version(state, version)
    nbytes = _count_nbytes(state, number)

    def run(progress: Progress | None) -> int:
        count_copied = CopyProgress(nbytes, progress)
        with checkpoint, new_file(file, overwrite=overwrite, nbytes=nbytes) as out:
            for part in encoding.encode(state, number, _read_data):
                count_copied(out.write(part))
        return nbytes

    return plan_file_export(path, run, nbytes)


def _count_nbytes(state: Mapping[str, object], version: int) -> int:
    """Return the size of the file. No tensor is read."""
    nbytes = 0

    def count(tensor: PlainTensor) -> bytes:
        nonlocal nbytes
        nbytes += tensor.nbytes
        return b""

    parts = encoding.encode(state, version, count)
    return sum(memoryview(part).nbytes for part in parts) + nbytes


class LocalFile:
    """A regular file, open for reading (`ReadableFile`).

    NotFoundError if it does not exist, ValueError if it is not a regular file. StorageError if it
    cannot be opened, CorruptError if it is a pointer of Git LFS.
    """

    num_links = 1

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = checked_file_path(path)
        try:
            # O_NONBLOCK: a pipe without a writer would block here.
            self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            raise NotFoundError(f"{self.path}: the file does not exist; check the path") from None
        except OSError as error:
            raise StorageError(f"{self.path} cannot be opened: {error.strerror}") from error
        status = os.fstat(self._descriptor)
        self.nbytes = status.st_size
        self.version = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        try:
            if not stat.S_ISREG(status.st_mode):
                raise ValueError(f"{self.path} is not a regular file: give the path of a file")
            check_fetched(self, self.path)
        except BaseException:
            self.close()
            raise

    def read_into(self, offset: int, target: memoryview) -> int:
        """Fill memory. CorruptError if the file was truncated since it was opened."""
        done = 0
        while done < target.nbytes:
            try:
                count = os.preadv(self._descriptor, [target[done:]], offset + done)
            except OSError as error:
                raise StorageError(f"{self.path} cannot be read: {error.strerror}") from error
            if not count:
                raise CorruptError(
                    f"{self.path}, byte {offset + done}: the file ends here, but had {self.nbytes} "
                    f"bytes when it was opened: do not write to a file that is being read"
                )
            done += count
        return done

    def close(self) -> None:
        """Close it."""
        os.close(self._descriptor)


class UnchangedFile(ForwardingStorage):
    """Opens a file for the import. CorruptError if it has changed since it was parsed."""

    def __init__(self, inner: Storage, version: tuple[int, ...]) -> None:
        super().__init__(inner)
        self._version = version

    def open(self, path: str) -> ReadableFile:
        """See `Storage.open`."""
        file = LocalFile(path)
        if file.version != self._version:
            file.close()
            raise CorruptError(
                f"{file.path} was changed after it was checked: do not write to a file that is "
                f"being read"
            )
        return file


def _build_foreign_state(state: Mapping[str, object], path: str) -> ForeignState:
    """Return a parsed state, whose tensors are in the file at `path`, for a virtual checkpoint.

    A dict that contains a tensor is a container, everything else is a value.
    """
    tree: list[Node] = []
    tensors: list[ForeignTensor] = []
    values: dict[str, object] = {}

    def add(fqn: str, value: object) -> None:
        if isinstance(value, FileTensor):
            chunk = ForeignChunk(Region.whole(value.shape), path, value.start)
            tensors.append(ForeignTensor(fqn, value.dtype, value.shape, (chunk,)))
        elif isinstance(value, Mapping) and (not fqn or _contains_tensors(value)):
            tree.append(Node(fqn, "dict", tuple(value)))
            for key, child in value.items():
                add(child_name(fqn, key), child)
        else:
            values[fqn] = value

    add("", state)
    step = state.get("global_step")
    step = step if isinstance(step, int) and step <= MAX_STEP else None
    return ForeignState(tensors, tuple(tree), values, {}, step=step)


def _contains_tensors(value: object) -> bool:
    if isinstance(value, Mapping):
        return any(map(_contains_tensors, value.values()))
    return isinstance(value, FileTensor)


def _read_tensors(state: Mapping[str, object], file: ReadableFile) -> dict[str, object]:
    """Return a state with the data of its tensors."""
    filled = dict(state)
    for name, value in state.items():
        if isinstance(value, FileTensor):
            data = memoryview(bytearray(value.nbytes))
            file.read_into(value.start, data)
            filled[name] = Array(value.dtype, value.shape, data)
        elif isinstance(value, Mapping):
            filled[name] = _read_tensors(value, file)
    return filled


def _as_arrays(value: object, fqn: str, *, depth: int = 1) -> object:
    """Return a value with an `Array` in place of each tensor of torch or numpy."""
    if isinstance(value, Mapping):
        if depth == 3:  # that of the tensors in "optim", "buffers"; a deeper value is refused
            return value
        return {
            key: _as_arrays(child, f"{fqn}.{key}", depth=depth + 1) for key, child in value.items()
        }
    if is_tensor(value) or not hasattr(value, "dtype"):
        return value
    from dist_ckpt.core.state.tensors.plain_torch import without_tensors  # noqa: PLC0415  (only this needs torch)

    plain = without_tensors(value, fqn)
    if type(plain) is not ArrayValue:
        return plain
    return Array(plain.dtype, plain.shape, memoryview(plain.data))


def _read_data(tensor: PlainTensor) -> Buffer:
    array = tensor[...] if isinstance(tensor, StoredTensor) else tensor
    assert isinstance(array, Array)
    return array.data


def _read_state(checkpoint: Checkpoint, selection: Selection) -> dict[str, object]:
    """Return the selected state in the form that `encode` accepts.

    The names of the model's tensors are flat. Other values have their full names, so that `encode`
    can refuse them by name.
    """
    contents = {
        **{fqn: checkpoint[fqn] for fqn in checkpoint},
        **checkpoint.objects,
        **dict.fromkeys(checkpoint.per_rank, "a value of each rank"),
    }
    by_prefix: dict[str, dict[str, object]] = {
        prefix: {} for prefix in ("model.", "optim.buffers.", "optim.", "")
    }
    model, buffers, optimizer, state = by_prefix.values()
    for fqn, value in contents.items():
        if fqn in selection:
            prefix = next(prefix for prefix in by_prefix if fqn.startswith(prefix))
            by_prefix[prefix][fqn.removeprefix(prefix)] = value
    if problems := selection.pattern_problems(contents):
        raise ValueError("; ".join(problems))
    if buffers:
        optimizer["buffers"] = buffers
    parts = {"model": model, "optim": optimizer}
    return state | {name: part for name, part in parts.items() if part}
