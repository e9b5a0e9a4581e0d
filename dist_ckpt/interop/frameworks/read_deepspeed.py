"""Read folders of DeepSpeed's `save_checkpoint` with ZeRO, with the partitions of all ranks.

Parameters are the fp32 master weights, and the optimizer's state is by their names. A group of
parameters is one flat vector, in the order of `param_shapes`, and each rank stores a part of it.
The parts are read in place. deepspeed/utils/zero_to_fp32.py defines the order.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

from dist_ckpt.core.format.geometry import ElementRange, Region, Shape
from dist_ckpt.core.format.objects.plain_types import Size
from dist_ckpt.core.storage import Storage
from dist_ckpt.errors import CheckpointError, CorruptError, IncompatibleError, NotFoundError
from dist_ckpt.interop.readers.nested_state import ImportFilter, NestedState
from dist_ckpt.interop.readers.restricted_pickle import (
    PickledRecord,
    PlaceholderFactory,
    UnknownObject,
    quote,
    record_factory,
)
from dist_ckpt.interop.readers.torch_pickles import TORCH_NAMES, TensorView
from dist_ckpt.interop.readers.virtual_checkpoint import ForeignChunk, ForeignState, ForeignTensor
from dist_ckpt.interop.registry import DEEPSPEED_LATEST, is_file, read_bytes
from dist_ckpt.interop.torch_save.read import Archive, open_archive, read_dict

_MODEL_FILE = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_PARTITION_FILE = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")

_CONVERT = (
    "convert it with DeepSpeed (zero_to_fp32.py for the weights, ds_to_universal.py), or save it "
    "with only data parallelism"
)


def is_folder(storage: Storage, path: str) -> bool:
    """Return True for a folder of one save, and for a run's folder with a `latest` file."""
    try:
        return any(
            _MODEL_FILE.fullmatch(entry.name) or _PARTITION_FILE.fullmatch(entry.name)
            for entry in storage.list(find_latest(storage, path))
        )
    except (OSError, CheckpointError):
        return False


def find_latest(storage: Storage, path: str) -> str:
    """Return the folder of the newest save if a path is that of a run, else the path."""
    if not is_file(storage, f"{path}/{DEEPSPEED_LATEST}"):
        return path
    text = read_bytes(storage, f"{path}/{DEEPSPEED_LATEST}", 4096)
    name = text.decode("utf-8", "replace").strip()
    if not name or "/" in name or "\0" in name or name in (".", ".."):
        raise CorruptError(
            f"{path}/{DEEPSPEED_LATEST} does not name a folder next to it; give the folder itself"
        )
    return f"{path}/{name}"


def list_files(storage: Storage, folder: str) -> tuple[list[str], list[str]]:
    """Return the names of the model's files and those of the partitions, in the order of ranks."""
    try:
        names = [entry.name for entry in storage.list(folder)]
    except (FileNotFoundError, NotADirectoryError):
        raise NotFoundError(f"{folder}: the folder does not exist; check the path") from None
    if other := next((n for n in names if re.match(r"layer_\d+|.*expert_\d+", n)), None):
        raise IncompatibleError(
            f"{folder}/{other} is for pipeline stages or experts, which are not supported: "
            f"{_CONVERT}"
        )
    groups: list[list[str]] = []
    for pattern in (_MODEL_FILE, _PARTITION_FILE):
        by_rank: dict[int, str] = {}
        for match in filter(None, map(pattern.fullmatch, names)):
            if int(match[2]):
                raise IncompatibleError(
                    f"{folder}/{match[0]} is for tensor parallelism, which is not supported: "
                    f"{_CONVERT}"
                )
            by_rank[int(match[1] or 0)] = match[0]
        if missing := sorted({*range(len(by_rank))} - by_rank.keys()):
            raise NotFoundError(f"{folder} lacks the file of rank {missing[0]}: copy it there")
        groups.append([by_rank[rank] for rank in sorted(by_rank)])
    if not groups[0]:
        raise NotFoundError(
            f"{folder} has no file such as mp_rank_00_model_states.pt, so it is not a checkpoint "
            f"of DeepSpeed; check the path"
        )
    return groups[0], groups[1]


_DEEPSPEED_NAMES = {
    **TORCH_NAMES,
    **{
        f"deepspeed.runtime.fp16.loss_scaler {name}": record_factory(name)
        for name in ("LossScaler", "DynamicLossScaler")
    },
    "deepspeed.runtime.zero.config ZeroStageEnum": PlaceholderFactory(
        "ZeroStageEnum", lambda stage: stage
    ),
}

# Keys of the model's file that describe its tensors, or contain them.
_TENSOR_KEYS = {
    *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes"),
    *("shared_params", "frozen_param_fragments"),
}

# Keys of a partition's file, and of the state in it, that describe or contain tensors.
_FILE_KEYS = {"optimizer_state_dict", "ds_config", "ds_version"}
_LAYOUT_KEYS = {
    *("zero_stage", "partition_count", "group_paddings", "param_alignment_paddings"),
    *("base_optimizer_state", "single_partition_of_fp32_groups", "param_slice_mappings"),
    *("optimizer_state_dict", "fp32_flat_groups", "ds_version"),
}

# A flat vector of a rank: a view and its archive.
_Vector = tuple[Archive, TensorView]


def read(storage: Storage, path: str, import_filter: ImportFilter) -> ForeignState:
    """Return the state in a folder, with its step. For a run's folder, this is the newest save.

    CorruptError, IncompatibleError for damaged files, or partitions that are not ZeRO's.
    """
    folder = find_latest(storage, path)
    models, partitions = list_files(storage, folder)
    nested = NestedState(folder, import_filter)
    with ExitStack() as stack:

        def read_files(names: list[str]) -> list[_FileRead]:
            paths = (f"{folder}/{name}" for name in names)
            archives = [
                stack.enter_context(open_archive(storage, path, _DEEPSPEED_NAMES)) for path in paths
            ]
            return [(archive, read_dict(archive)) for archive in archives]

        files = _ZeroFiles(nested, read_files(models), read_files(partitions))
        files.add_all()
    return nested.state(files.model.get("global_steps"))


@dataclass(frozen=True, slots=True)
class _FlatSlice:
    """Elements of a tensor in the vector `number` of a rank, from offset `at` on."""

    rank: int
    number: int
    at: int
    elements: ElementRange


@dataclass(frozen=True, slots=True)
class _Parameter:
    """A partitioned parameter: its group, and the locations of its parts."""

    name: str
    shape: Shape
    group: int
    slices: Sequence[_FlatSlice]


_FileRead = tuple[Archive, dict[Any, Any]]


class _ZeroFiles:
    """Locates the parts of every tensor in the files of a folder, and adds them to a state."""

    def __init__(
        self, nested: NestedState, models: list[_FileRead], partitions: list[_FileRead]
    ) -> None:
        self._nested = nested
        self._models = models
        self._partition_files = partitions
        self._archive, self.model = models[0]
        self._partitions = [
            (file, self._expect(d.get("optimizer_state_dict"), dict)) for file, d in partitions
        ]
        first = self._partitions[0][1] if partitions else {}
        self._num_ranks = len(partitions)
        self._stage = first.get("zero_stage", 0 if not partitions else 1)
        if type(self._stage) is not int or not 0 <= self._stage <= 3:
            raise self._corrupt(f"zero_stage is {quote(self._stage)}, not a number from 0 to 3")
        self._check_count(first)

    def add_all(self) -> None:
        """Add the model, the optimizer and everything else."""
        parameters: dict[str, _Parameter] = {}
        for parameter in self._parameters() if self._partitions else ():
            if parameters.setdefault(parameter.name, parameter) is not parameter:
                raise self._corrupt(f"two parameters are {parameter.name}")
        shared = self._expect_names(self.model.get("shared_params") or {})
        self._add_module(parameters.keys(), shared)
        for parameter in parameters.values():
            self._add_partitioned(("model", parameter.name), parameter, self._weights)
        for name, other in shared.items():
            self._nested.add_alias(("model", name), f"model.{other}")
        if self._partitions:
            self._add_optimizer([*parameters.values()])
            self._add_other_values()
        elif self.model.get("optimizer") is not None:
            self._nested.add(("optim",), self.model["optimizer"], self._archive)
        for key, value in self.model.items():
            if key not in _TENSOR_KEYS:
                self._nested.add((str(key),), value, self._archive)

    def _add_module(self, partitioned: Collection[str], shared: Mapping[str, str]) -> None:
        """Add what has no partitions: buffers, frozen parameters, or without ZeRO all of it."""
        module = self._expect_names(self.model.get("module"))
        buffers = self._expect(self.model.get("buffer_names") or [], list)
        frozen = self._expect(self.model.get("frozen_param_shapes") or {}, dict)
        self._nested.add_versions("model", self.model.get("module"), module, self._archive.budget)
        for name, value in module.items():
            if name in partitioned or name in shared:
                continue
            if name in frozen and self._stage == 3:
                self._add_frozen(name, self._expect_shape(frozen[name]))
            elif name in buffers or self._stage < 3:
                self._nested.add(("model", name), value, self._archive)
            elif not self._nested.excludes(f"model.{name}"):
                raise IncompatibleError(
                    f"{self._archive.label}: no file has the data of {name}. It may be a weight "
                    f"tied to another one. Leave it out (exclude='model.{name}', on the command "
                    f"line --exclude model.{name}); a load into a module ties it again"
                )

    def _add_frozen(self, name: str, shape: Shape) -> None:
        """Add a frozen parameter of ZeRO-3: each rank has a part, and the last is padded."""
        vectors, slices = [], []
        numel, part = prod(shape), -(-prod(shape) // len(self._models))
        for rank, (archive, state) in enumerate(self._models):
            fragments = self._expect(state.get("frozen_param_fragments"), dict)
            vectors.append([(archive, self._expect_view(fragments.get(name)))])
            elements = ElementRange(min(rank * part, numel), min((rank + 1) * part, numel))
            slices.append(_FlatSlice(rank, 0, 0, elements))
        self._add_partitioned(("model", name), _Parameter(name, shape, 0, slices), vectors)

    def _parameters(self) -> Iterator[_Parameter]:
        """Yield the partitioned parameters, each with its parts."""
        groups = [
            self._expect_names(group)
            for group in self._expect(self.model.get("param_shapes"), list)
        ]
        sizes = [[prod(view.shape) for _, view in vectors] for vectors in self._weights]
        if self._stage == 3:
            yield from self._interleaved_parameters(groups, sizes)
            return
        paddings = self._partitions[0][1].get("param_alignment_paddings")
        for number, group in enumerate(groups):
            if any(number >= len(rank_sizes) for rank_sizes in sizes):
                raise self._corrupt(f"the group {number} has no vector on some rank")
            at = 0
            for index, (name, size) in enumerate(group.items()):
                shape = self._expect_shape(size)
                vectors = [
                    (rank, number, rank_sizes[number]) for rank, rank_sizes in enumerate(sizes)
                ]
                yield _Parameter(name, shape, number, [*_locate(vectors, at, prod(shape), 0)])
                at += prod(shape) + (self._padding(paddings, number, index) if paddings else 0)

    def _interleaved_parameters(
        self, groups: list[dict[Any, Any]], sizes: list[list[int]]
    ) -> Iterator[_Parameter]:
        """Yield the parameters of ZeRO-3: each rank has an equal part of each, in their order."""
        at = 0
        for number, group in enumerate(groups):
            for name, size in group.items():
                shape = self._expect_shape(size)
                numel = prod(shape)
                part = -(-numel // self._num_ranks)
                slices: list[_FlatSlice] = []
                for rank, rank_sizes in enumerate(sizes):
                    first = min(rank * part, numel)
                    vectors = [(rank, index, size) for index, size in enumerate(rank_sizes)]
                    slices += _locate(vectors, at, min(part, numel - first), first)
                yield _Parameter(name, shape, number, slices)
                at += part

    @cached_property
    def _weights(self) -> list[list[_Vector]]:
        """The vectors of the fp32 weights, by rank."""
        key = "fp32_flat_groups" if self._stage == 3 else "single_partition_of_fp32_groups"
        return [
            [(archive, self._expect_view(tensor)) for tensor in self._expect(state.get(key), list)]
            for archive, state in self._partitions
        ]

    def _optimizer_state(self, rank: int) -> dict[Any, Any]:
        """Return the state dict of the optimizer that updates the vectors of a rank."""
        _, state = self._partitions[rank]
        key = "optimizer_state_dict" if self._stage == 3 else "base_optimizer_state"
        base = state.get(key)
        if not isinstance(base, dict) or not isinstance(base.get("state"), dict):
            raise IncompatibleError(
                f"{self._partitions[rank][0].label}: {key} has no state by parameter, as with "
                f'"elastic_checkpoint": save it without that, or leave it out (exclude="optim", '
                f"on the command line --exclude optim)"
            )
        return base

    def _add_optimizer(self, parameters: list[_Parameter]) -> None:
        if self._nested.excludes("optim"):
            return
        states = [self._optimizer_state(rank) for rank in range(self._num_ranks)]
        archives = [archive for archive, _ in self._partitions]
        for parameter in parameters:
            above = ("optim", "state", f"model.{parameter.name}")
            rank, number = 0, parameter.group
            if parameter.slices:
                rank, number = parameter.slices[0].rank, parameter.slices[0].number
            for key, value in self._parameter_state(states[rank], number).items():
                if isinstance(value, TensorView) and value.shape:
                    vectors = []
                    for state, archive, weights in zip(
                        states, archives, self._weights, strict=True
                    ):
                        entries = [self._parameter_state(state, n) for n in range(len(weights))]
                        views = (self._expect_view(entry.get(key)) for entry in entries)
                        vectors.append([(archive, view) for view in views])
                    self._add_partitioned((*above, str(key)), parameter, vectors)
                else:
                    self._nested.add((*above, str(key)), value, archives[rank])
        self._add_groups(states[0], parameters, archives[0])

    def _add_groups(
        self, state: dict[Any, Any], parameters: list[_Parameter], archive: Archive
    ) -> None:
        """Add the optimizer's groups, with the names of the parameters, and its further keys."""
        groups = self._expect(state.get("param_groups"), list)
        names: dict[int, list[str]] = {}
        for parameter in parameters:
            names.setdefault(parameter.group, []).append(f"model.{parameter.name}")
        if any(number >= len(groups) for number in names):
            raise self._corrupt(f"its parameters need more than its {len(groups)} groups")
        named_groups = [
            {**self._expect(group, dict), "params": names.get(number, [])}
            for number, group in enumerate(groups)
        ]
        self._nested.add(("optim", "param_groups"), named_groups, archive)
        for key in state.keys() - {"state", "param_groups"}:
            self._nested.add(("optim", str(key)), state[key], archive)

    def _add_other_values(self) -> None:
        """Add the other values of the partitions: ZeRO's from the first rank, others per rank."""
        for rank, (archive, file) in enumerate(self._partition_files):
            for key in file.keys() - _FILE_KEYS:
                self._nested.add_rank_value(("zero", str(key)), rank, file[key], archive)
        archive, state = self._partitions[0]
        for key, value in state.items():
            if key not in _LAYOUT_KEYS:
                if isinstance(value, PickledRecord):
                    value = {"class": value.name, **value.fields}  # noqa: PLW2901 - as plain data
                self._nested.add(("zero", str(key)), value, archive)

    def _parameter_state(self, optimizer: dict[Any, Any], number: int) -> dict[Any, Any]:
        entries: dict[Any, Any] = self._expect(optimizer["state"].get(number, {}), dict)
        return entries

    def _add_partitioned(
        self, path: tuple[str, ...], parameter: _Parameter, vectors: Sequence[list[_Vector]]
    ) -> None:
        """Add a tensor that has a parameter's layout in the vectors of the ranks."""
        fqn = ".".join(path)
        if self._nested.excludes(fqn):
            return
        chunks, dtypes = list[ForeignChunk](), set[str]()
        for piece in parameter.slices:
            archive, view = vectors[piece.rank][piece.number]
            vector = archive.locate(view, fqn)
            dtypes.add(view.dtype)
            numel = piece.elements.numel
            if not view.is_contiguous or piece.at + numel > prod(view.shape):
                raise self._corrupt(f"{fqn} ends after the vector of rank {piece.rank}")
            if numel or (0 in parameter.shape and not chunks):
                cell = piece.elements if numel else Region.whole(parameter.shape)
                start = vector.start + piece.at * view.itemsize
                chunks.append(replace(vector, cell=cell, start=start))
        if len(dtypes) != 1 or not chunks:
            raise self._corrupt(f"{fqn} has {len(chunks)} parts of {len(dtypes)} dtypes")
        tensor = ForeignTensor(fqn, dtypes.pop(), parameter.shape, tuple(chunks))
        self._nested.add_tensor(path, tensor, self._archive)

    def _check_count(self, first: Mapping[str, object]) -> None:
        num_ranks = self._num_ranks
        count = first.get("partition_count", num_ranks)
        counts = count if isinstance(count, list) and count else [count]
        if not all(type(number) is int for number in counts):
            raise self._corrupt("partition_count is not a number, nor a list of numbers")
        if (expected := max(counts)) != num_ranks:
            raise NotFoundError(
                f"{self._archive.label} has {expected} partitions, but only {num_ranks} of their "
                f"files exist: copy the others there"
            )
        if self._stage == 3 and len(self._models) != num_ranks:
            raise NotFoundError(
                f"{self._archive.label}: {len(self._models)} files of the model exist, but "
                f"{num_ranks} of the optimizer: copy the others there"
            )

    def _padding(self, paddings: object, group: int, index: int) -> int:
        try:
            padding = paddings[group][index]  # type: ignore[index]
        except (TypeError, IndexError, KeyError):
            padding = None
        if type(padding) is not int or padding < 0:
            raise self._corrupt("its paddings do not match its parameters")
        return padding

    def _expect_shape(self, size: object) -> Shape:
        if not isinstance(size, Size):
            raise self._corrupt("a parameter without a shape")
        return size.shape

    def _expect_view(self, value: object) -> TensorView:
        if not isinstance(value, TensorView):
            raise self._corrupt("a rank has no vector where one must be")
        return value

    def _expect_names(self, value: object) -> dict[str, Any]:
        """Return a dict by parameter names."""
        by_name: dict[str, Any] = self._expect(value, dict)
        for name in by_name:
            self._expect(name, str)
        return by_name

    def _expect(self, value: object, cls: type[Any]) -> Any:
        if isinstance(value, UnknownObject) or not isinstance(value, cls):
            raise self._corrupt(f"a {type(value).__name__} in place of a {cls.__name__}")
        return value

    def _corrupt(self, why: str) -> CorruptError:
        return CorruptError(f"{self._models[0][0].label}: {why}; use another checkpoint")


def _locate(
    vectors: Sequence[tuple[int, int, int]], at: int, numel: int, start: int
) -> Iterator[_FlatSlice]:
    """Yield the locations of `numel` elements of a tensor, from its element `start` on.

    A vector is (rank, number, size). The vectors are consecutive, and the first of the tensor's
    elements is at offset `at` in them.
    """
    if not numel:  # an empty tensor has no location, but it needs a vector's dtype
        for rank, number, _ in vectors[:1]:
            yield _FlatSlice(rank, number, 0, ElementRange(start, start))
    begin = 0
    for rank, number, size in vectors:
        first, end = max(at, begin), min(at + numel, begin + size)
        if first < end:
            elements = ElementRange(start + first - at, start + end - at)
            yield _FlatSlice(rank, number, first - begin, elements)
        begin += size
