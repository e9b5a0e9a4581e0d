"""`dc.open`: look into a checkpoint, and read parts of it, without torch."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from math import prod
from typing import TYPE_CHECKING

from dist_ckpt.core.checkpoint.open_checkpoint import OpenCheckpoint
from dist_ckpt.core.checkpoint.opener import NATIVE, Opener
from dist_ckpt.core.commit import attempts
from dist_ckpt.core.commit.records.recorded_checks import naming_newest_good
from dist_ckpt.core.format import strict_json
from dist_ckpt.core.format.dtypes import DTYPES
from dist_ckpt.core.format.filenames import Attempt
from dist_ckpt.core.format.geometry import Region, Shape, check_shape
from dist_ckpt.core.format.index.index import Catalog, Index, Key
from dist_ckpt.core.format.index.model_description import (
    as_json,
    config_of,
    find_report_problems,
    kind_of,
)
from dist_ckpt.core.format.objects.objects_file import ObjectsFile
from dist_ckpt.core.format.objects.plain_types import ArrayValue, Placeholder
from dist_ckpt.core.format.strict_json import Json
from dist_ckpt.core.planning.plan import TensorRequest
from dist_ckpt.core.shard_io.memory.host_array import (
    Array,
    BasicIndex,
    element_indices,
    select_elements,
)
from dist_ckpt.core.state.tree.containers import RECORD, child_name, find_enclosing_subclass
from dist_ckpt.core.storage import Storage
from dist_ckpt.errors import CorruptError, IncompatibleError
from dist_ckpt.message_text import listed
from dist_ckpt.settings import Settings

if TYPE_CHECKING:
    import numpy as np

# How many shard files stay open between reads: enough for the shards of a tensor on one host.
MAX_OPEN_FILES = 64


def open(  # noqa: A001  # it is `dc.open`
    path: str | os.PathLike[str], *, opener: Opener = NATIVE
) -> Checkpoint:
    """Open the checkpoint at `path`. Only its index is read.

    `path` may be a selector, such as "runs/a@latest" or "runs/a@min:val/loss". Raises
    NotFoundError if there is none, CorruptError if its index is damaged, and IncompatibleError if a
    newer dist_ckpt wrote it.
    """
    return open_at(*opener.find(path))


def open_at(storage: Storage, path: str) -> Checkpoint:
    """Open the checkpoint at a storage's path, as `open` does."""
    with naming_newest_good(storage, path):
        attempt, index = attempts.find_checkpoint(storage, path)
    return Checkpoint(storage, path, attempt, index)


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """The metadata of one tensor; `alias_of` names the tensor that it is tied to.

    `pieces` are the sizes of the matrices in a fused tensor, along dimension `fused_dim`. They are
    known if the rule of the save named them.
    """

    dtype: str
    shape: Shape
    nbytes: int
    component: str
    num_shards: int
    alias_of: str | None
    fused_dim: int | None = None
    pieces: tuple[int, ...] = ()


class Checkpoint:
    """A committed checkpoint. Its contents are read on demand, and checked.

    `ck["model.w"][rows, cols]` reads the blocks of these elements. Files stay open between reads:
    close the checkpoint, or use it in a `with`. A checkpoint that is not closed causes a
    ResourceWarning. Threads may share a checkpoint; their reads take turns.
    """

    def __init__(self, storage: Storage, path: str, attempt: Attempt, index: Index) -> None:
        self.path = path
        self.index = index
        threads = Settings.from_environment().threads
        self._opened = OpenCheckpoint(
            storage,
            path,
            attempt,
            index,
            make=_to_array,
            max_open_files=MAX_OPEN_FILES,
            threads=threads,
        )

    @property
    def step(self) -> int | None:
        """The step that was given to `save`."""
        return self.index.step

    @property
    def world_size(self) -> int:
        """The number of ranks that saved it."""
        return self.index.catalog.world_size

    @property
    def mesh(self) -> Mapping[str, int]:
        """The names and sizes of the job's mesh, slowest axis first; empty if it had none."""
        return dict(self.index.catalog.mesh)

    @property
    def nbytes(self) -> int:
        """The size of all its data files."""
        return self.index.nbytes

    @cached_property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Metadata of each tensor; a tied tensor appears under all its names."""
        catalog = self.index.catalog
        return {fqn: self._info(fqn) for fqn in (*catalog.tensors, *catalog.aliases)}

    def _info(self, fqn: str) -> TensorInfo:
        """Return the metadata of one tensor."""
        catalog = self.index.catalog
        stored = catalog.aliases.get(fqn, fqn)
        record, fusion = catalog.tensors[stored], catalog.fused.get(stored)
        return TensorInfo(
            dtype=record.dtype,
            shape=record.shape,
            nbytes=prod(record.shape) * DTYPES[record.dtype].itemsize,
            component=catalog.components[record.component].name,
            num_shards=catalog.layouts[record.layout].cut.num_cells,
            alias_of=catalog.aliases.get(fqn),
            fused_dim=fusion.dim if fusion else None,
            pieces=fusion.sizes if fusion else (),
        )

    @cached_property
    def objects(self) -> Mapping[str, object]:
        """The values that are not tensors and not per rank. Torch's types are placeholders."""
        names = self.index.catalog.values
        return {**self._global_objects.values, **{fqn: self._opened.value(fqn) for fqn in names}}

    @cached_property
    def per_rank(self) -> Mapping[str, Mapping[Key, object]]:
        """The per-rank values of each name, by key."""
        return {
            fqn: {key: self._opened.value_of_rank(fqn, key) for key, _ in keys}
            for fqn, keys in self.index.catalog.per_rank.items()
        }

    @property
    def metadata(self) -> Mapping[str, object]:
        """The metadata that was given to `save`."""
        return self._global_objects.metadata

    @property
    def config(self) -> Mapping[str, object] | None:
        """The `config` that was given to `save`; None if none was."""
        return config_of(self.metadata)

    @property
    def kind(self) -> str | None:
        """The `kind` that was given to `save`; None if none was."""
        return kind_of(self.index.metadata)

    @property
    def num_parameters(self) -> int | None:
        """The number of elements of all parameters. None if the state had no modules.

        Tied parameters count once. A quantized tensor counts with its full shape.
        """
        return None if self._counts is None else self._counts.num_parameters

    @property
    def num_trainable(self) -> int | None:
        """The number of elements of its parameters that required a gradient at the save."""
        return None if self._counts is None else self._counts.num_trainable

    @cached_property
    def _counts(self) -> ParameterCounts | None:
        return count_parameters(self.index.catalog, lambda fqn: self.objects[fqn])

    @property
    def attached(self) -> Mapping[str, int]:
        """The files that were attached to it, by name, and their sizes in bytes."""
        return {record.name: record.nbytes for record in self.index.attached}

    def read_attached(self, name: str) -> bytes:
        """Read and check an attached file. KeyError if there is none, CorruptError if damaged."""
        if name in self.attached:
            return self._opened.read_attached(name)
        names = f"there are {listed(list(self.attached))}" if self.attached else "there is nothing"
        raise KeyError(f"{self.path} has no attached {name!r}; {names}")

    def report(self, name: str) -> Json:
        """Return the contents of an attached JSON file, after a comparison with this checkpoint.

        IncompatibleError if `kind`, `config`, `num_parameters` or `num_params` in the file differ
        from the checkpoint; values that the checkpoint does not have are not compared. ValueError
        if the file is not strict JSON. Otherwise raises the errors of `read_attached`.
        """
        data = self.read_attached(name)
        try:
            document = strict_json.parse(data, name)
        except CorruptError as error:
            raise ValueError(
                f"{self.path}: the attached {name!r} is not strict JSON, {error}: see read_attached"
            ) from None
        if isinstance(document, dict):
            config = None if self.config is None else as_json(self.config)
            problems = find_report_problems(document, self.kind, config, self.num_parameters)
            if problems:
                raise IncompatibleError(
                    f"{self.path}: its report {name!r} is of another model: "
                    f"{listed(problems, '; ')}"
                )
        return document

    def __getitem__(self, fqn: str) -> StoredTensor:
        if fqn not in self:
            hint = "it is in `.objects`" if fqn in self.index.catalog.values else "see `.tensors`"
            raise KeyError(f"{self.path} has no tensor {fqn!r}; {hint}")
        info = self._info(fqn)
        return StoredTensor(self, fqn, info.dtype, info.shape, info.nbytes)

    def __contains__(self, fqn: object) -> bool:
        return fqn in self.index.catalog.tensors or fqn in self.index.catalog.aliases

    def __iter__(self) -> Iterator[str]:
        return chain(self.index.catalog.tensors, self.index.catalog.aliases)

    def __len__(self) -> int:
        return len(self.index.catalog.tensors) + len(self.index.catalog.aliases)

    def __repr__(self) -> str:
        return f"Checkpoint({self.path!r}, step={self.step}, {len(self)} tensors)"

    def close(self) -> None:
        """Close the files. Nothing can be read afterwards. Never raises."""
        self._opened.close()

    def __del__(self, warn: Callable[..., None] = warnings.warn) -> None:
        opened: OpenCheckpoint | None = getattr(self, "_opened", None)
        if opened is None or not opened.has_open_files:
            return
        try:
            message = f"{self!r} was not closed: call close(), or use it in a `with`"
            warn(message, ResourceWarning, stacklevel=2, source=self)
        finally:
            opened.close_unshared()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self, fqn: str, region: Region) -> Array:
        """Read and check the blocks of a region of a tensor, and return the region."""
        info = self._info(fqn)
        itemsize = DTYPES[info.dtype].itemsize
        data = memoryview(bytearray(region.numel * itemsize))
        self._opened.read([TensorRequest(fqn, info.dtype, info.shape, (region,))], data)
        self._opened.buffers.clear()  # the next read may be much later
        return Array(info.dtype, region.shape, data)

    @property
    def _global_objects(self) -> ObjectsFile:
        if self._opened.has_objects():
            return self._opened.objects()
        return ObjectsFile(metadata=self.index.metadata)


@dataclass(frozen=True, slots=True, repr=False)
class StoredTensor:
    """One tensor of a checkpoint: index it to read a part. `shape` is the global shape.

    `tensor[2:5, ..., 0]` reads the blocks of these elements and returns an `Array`. An index has
    integers, slices without a step, `...` and None, as in numpy. `numpy.asarray` reads all of it.
    """

    checkpoint: Checkpoint
    fqn: str
    dtype: str
    shape: Shape
    nbytes: int

    def __getitem__(self, index: BasicIndex | tuple[BasicIndex, ...]) -> Array:
        region, shape = select_elements(index, self.shape)
        read = self.checkpoint.read(self.fqn, region)
        return Array(read.dtype, shape, read.data)

    def __len__(self) -> int:
        return len(element_indices(self.shape))

    def __iter__(self) -> Iterator[Array]:
        return (self[i] for i in element_indices(self.shape))

    def __array__(
        self,
        dtype: np.dtype | None = None,
        copy: bool | None = None,  # noqa: FBT001 - numpy's
    ) -> np.ndarray:
        return self[...].__array__(dtype, copy)

    def __repr__(self) -> str:
        return f"StoredTensor({self.fqn!r}, {self.dtype}, {self.shape})"


def _to_array(value: Placeholder) -> object:
    """Return an array for the placeholder of an array. Return other placeholders unchanged."""
    if isinstance(value, ArrayValue):
        return Array(value.dtype, value.shape, memoryview(value.data))
    return value


@dataclass(frozen=True, slots=True)
class ParameterCounts:
    """The number of elements of all parameters, and of trainable ones. Tied ones count once."""

    num_parameters: int
    num_trainable: int


def count_parameters(
    catalog: Catalog, value_of: Callable[[str], object], component: str | None = None
) -> ParameterCounts | None:
    """Count the parameters of one component or of all. None if the catalog does not list them.

    `value_of` returns a saved value by name. It is called for quantized parameters: a value has
    their full shape. CorruptError if that is not a shape.
    """
    wholes: dict[str, tuple[int, bool]] = {}
    for fqn, trainable in catalog.parameters.items():
        record = catalog.tensors[fqn]
        if component not in (None, catalog.components[record.component].name):
            continue
        if (whole := find_enclosing_subclass(fqn, catalog.values)) is None:
            wholes[fqn] = prod(record.shape), trainable
        elif whole not in wholes:
            wholes[whole] = _numel_of(whole, value_of(child_name(whole, RECORD))), trainable
    if not wholes:
        return None
    num_trainable = sum(numel for numel, is_trainable in wholes.values() if is_trainable)
    return ParameterCounts(sum(numel for numel, _ in wholes.values()), num_trainable)


def _numel_of(whole: str, record: object) -> int:
    shape = record.get("shape") if isinstance(record, Mapping) else None
    try:
        if not (isinstance(shape, list | tuple) and all(type(n) is int and n >= 0 for n in shape)):
            raise ValueError("not one of whole numbers")
        check_shape(tuple(shape), 1)
    except ValueError as error:
        raise CorruptError(f"{whole} is not a tensor: its shape {shape!r}: {error}") from None
    return prod(shape)
