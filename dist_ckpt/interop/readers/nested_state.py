"""Turn nested state that another system pickled into the tensors and values of a checkpoint.

Files may contain values that a checkpoint cannot store: `ImportFilter` selects names.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import PurePath
from typing import Any, NamedTuple, Protocol

from dist_ckpt.core.format.index.index import MAX_STEP, ListedVersions, Node
from dist_ckpt.core.format.index.index_json import MAX_FQN_CHARS
from dist_ckpt.core.format.objects.plain_codec import check_plain
from dist_ckpt.core.format.objects.plain_types import Device, NumpyScalar
from dist_ckpt.core.format.strict_json import is_text
from dist_ckpt.core.planning.module_versions import list_versions, state_dict_metadata
from dist_ckpt.core.planning.name_selection import Selection, excluded_names
from dist_ckpt.core.state.tree.containers import (
    MAX_DEPTH,
    PathKey,
    child_name,
    container_entries,
    container_kind,
    create_container,
)
from dist_ckpt.errors import CorruptError, IncompatibleError
from dist_ckpt.interop.readers.restricted_pickle import PickleBudget, UnknownObject
from dist_ckpt.interop.readers.torch_pickles import NumpyArray, TensorView
from dist_ckpt.interop.readers.virtual_checkpoint import ForeignChunk, ForeignState, ForeignTensor


class ImportFilter(NamedTuple):
    """The names to read. A value that no checkpoint can store is an error only if it is needed."""

    selection: Selection
    needs: Callable[[str], bool]


Path = tuple[PathKey, ...]

# The cost of a name in a `PickleBudget`, besides its characters.
_NAME_COST = 64

_USED_TWICE = "the name of two things: rename one"


def join_path(path: Path) -> str:
    """Return the name for a path."""
    return ".".join(map(str, path))


def build_tree(paths: Iterable[Path]) -> tuple[Node, ...]:
    """Return the containers of a nested state. With the keys 0, 1, ... a container is a list."""
    keys: dict[Path, dict[PathKey, None]] = {(): {}}
    for path in paths:
        for depth, key in enumerate(path):
            keys.setdefault(path[:depth], {})[key] = None
    nodes = []
    for path, children in keys.items():
        numbers = sorted(key for key in children if isinstance(key, int))
        is_list = numbers and numbers == [*range(len(children))]
        kind, ordered = ("list", numbers) if is_list else ("dict", children)
        nodes.append(Node(join_path(path), kind, tuple(ordered)))
    return tuple(nodes)


def numbered_name(name: str, number: int) -> str:
    """Return the name of one of several objects: `optim`, `optim_1`, `optim_2`."""
    return f"{name}_{number}" if number else name


def _with_param_names(optimizer: object, model: str, budget: PickleBudget) -> object:
    """Return an optimizer's state by parameter names if it has them, else unchanged."""
    if not isinstance(optimizer, dict):
        return optimizer
    groups, state = optimizer.get("param_groups"), optimizer.get("state")
    if not isinstance(groups, list) or not isinstance(state, dict):
        return optimizer
    names: dict[Any, str] = {}
    named_groups = []
    for group in groups:
        param_names = group.get("param_names") if isinstance(group, dict) else None
        if not isinstance(param_names, list):
            return optimizer
        budget.spend(_NAME_COST * len(param_names))
        if not _are_names(param_names, group.get("params")):
            return optimizer
        budget.spend(sum(map(len, param_names)))
        params = [f"{model}.{name}" for name in param_names]
        names.update(zip(group["params"], params, strict=True))
        rest = {key: value for key, value in group.items() if key != "param_names"}
        named_groups.append({**rest, "params": params})
    by_name = {names.get(key, key): value for key, value in state.items()}
    return {**optimizer, "state": by_name, "param_groups": named_groups}


def _are_names(param_names: list[object], params: object) -> bool:
    if not isinstance(params, list) or len(params) != len(param_names):
        return False
    # Larger integers are refused: a file could choose their hashes.
    numbers = all(type(number) is int and number.bit_length() <= 64 for number in params)
    return numbers and all(type(name) is str for name in param_names)


class Pickled(Protocol):
    """A pickle that was read: it locates tensors, and limits what is built from its values."""

    budget: PickleBudget

    def locate(self, view: TensorView, fqn: str) -> ForeignChunk:
        """Return the location of a tensor's elements, as a whole tensor."""


class NestedState:
    """Collects the contents of files, name by name; `label` names the files in errors.

    A container with tensors is a node of the tree, everything else is a value. A second name of a
    tensor is an alias. IncompatibleError names a value that a checkpoint cannot store. If the value
    is not needed, None is stored instead.
    """

    def __init__(self, label: str, import_filter: ImportFilter) -> None:
        self.tensors: dict[str, ForeignTensor] = {}
        self.per_rank: dict[str, dict[int, object]] = {}
        # The versions of modules (`planning/module_versions.py`). None if no file can have them.
        self.versions: dict[str, ListedVersions] | None = {}
        self.has_text_keys = False  # DCP flattens nested states
        self._aliases: dict[str, str] = {}
        self._values: dict[str, object] = {}
        self._nodes: list[Node] = []
        self._paths: dict[str, Path] = {}
        self._label = label
        self._selection = import_filter.selection
        self._needs = import_filter.needs
        self._excluded: list[str] = []
        self._first: dict[object, str] = {}
        self._has_tensors: dict[int, bool] = {}

    def excludes(self, fqn: str) -> bool:
        """Return True if the selection excludes a name."""
        # Longer names are refused later. They are not matched: that takes quadratic time.
        is_out = len(fqn) <= MAX_FQN_CHARS and fqn not in self._selection
        if is_out:
            self._excluded.append(fqn)
        return is_out

    def add(self, path: Path, value: object, pickled: Pickled) -> None:
        """Add the value at a path of the state, with all values inside it."""
        if self.excludes(join_path(path)):
            return
        with self._errors_at(path):
            chosen = self._select(join_path(path), value, pickled.budget, 0)
        self._add_chosen(path, chosen, pickled)

    def _add_chosen(self, path: Path, value: object, pickled: Pickled) -> None:
        self._reserve(path)
        with self._errors_at(path):
            self._has_tensors = {}  # by identity of objects that live as long as the value
            self._add(join_path(path), value, pickled, 0, "")

    @contextmanager
    def _errors_at(self, path: Path) -> Iterator[None]:
        """Raise CorruptError with the path for a ValueError."""
        try:
            yield
        except ValueError as error:
            raise CorruptError(
                f"{self._label}: {join_path(path)[:100] or 'the state'}: {error}"
            ) from None

    def add_optimizer(self, path: Path, value: object, model: str, pickled: Pickled) -> None:
        """Add an optimizer's state dict. If it has parameter names, use them, below `model`.

        Optimizers of torch have names if they were built from `named_parameters()`. Others have
        numbers: the position of a parameter in the groups, which a load uses.
        """
        with self._errors_at(path):
            named = _with_param_names(value, model, pickled.budget)
        self.add(path, named, pickled)

    def add_versions(
        self, fqn: str, state: object, names: Iterable[object], cost: PickleBudget
    ) -> None:
        """Add the versions of a module, if its state dict has them."""
        metadata = state_dict_metadata(state)
        if metadata is not None and self.versions is not None:
            cost.spend(sum(_NAME_COST + len(path) + len(of) for path, of in metadata.items()))
            listed_versions = list_versions(metadata, map(str, names))
            self.versions[fqn] = {**self.versions.get(fqn, {}), **listed_versions}

    def add_top(self, state: Mapping[Any, object], pickled: Pickled) -> None:
        """Add the whole state: a dict, whose keys are the components."""
        with self._errors_at(()):
            chosen = self._select("", state, pickled.budget, 0)
            has_tensors = _contains_tensors(chosen, {}, 0)
        if has_tensors:
            self._add_chosen((), chosen, pickled)
            return
        assert isinstance(chosen, Mapping)
        for key, value in chosen.items():
            if type(key) not in (str, int):
                raise self._naming_error("", f"a dict with {_describe_key(key)}")
            self._add_chosen((key,), value, pickled)

    def add_tensor(self, path: Path, tensor: ForeignTensor, pickled: Pickled | None = None) -> None:
        """Add a tensor whose parts are in files. With `pickled`, its budget pays for the name."""
        if not self.excludes(tensor.fqn):
            self._reserve(path)
            self.tensors[tensor.fqn] = tensor
            if pickled is not None:
                with self._errors_at(path):
                    pickled.budget.spend(_NAME_COST + len(tensor.fqn))

    def add_alias(self, path: Path, other: str) -> None:
        """Add another name of an added tensor. ValueError if that tensor was excluded."""
        fqn, other = join_path(path), self._aliases.get(other, other)
        if self.excludes(fqn):
            return
        if other not in self.tensors:
            tied = f"{self._label}: {fqn} is tied to {other}, which"
            if other in self._excluded:
                raise ValueError(f"{tied} is excluded: exclude both of them, or neither")
            raise CorruptError(f"{tied} the files lack; use another checkpoint")
        self._reserve(path)
        self._aliases[fqn] = other

    def add_rank_value(self, path: Path, rank: int, value: object, pickled: Pickled) -> None:
        """Add one rank's value of plain data, without tensors."""
        fqn = join_path(path)
        if self.excludes(fqn):
            return
        if fqn not in self.per_rank:
            self._reserve(path)
        plain = self._to_plain(fqn, self._select(fqn, value, pickled.budget, 0), pickled.budget)
        self.per_rank.setdefault(fqn, {})[rank] = plain

    def state(self, step: object = None) -> ForeignState:
        """Return all that was added, with the step if a checkpoint can have it.

        ValueError for an exclude pattern that matched no name.
        """
        valid_step = step if type(step) is int and 0 <= step <= MAX_STEP else None
        if problems := self._selection.pattern_problems(self._excluded):
            raise ValueError("; ".join(problems))
        has_values = any(value not in ({}, []) for value in self._values.values())
        has_contents = self.tensors or self.per_rank or self._nodes or has_values
        if not (has_contents or self._selection.is_everything):
            raise ValueError(f"{self._selection} leaves nothing: give other patterns")
        above = () if () in self._paths.values() else build_tree(self._paths.values())
        tree = (*above, *self._nodes)
        # Two entries can have one name, such as "a.b" and "b" in "a".
        names, nodes = set[str](), (node.fqn for node in tree)
        for fqn in chain(nodes, self.tensors, self._aliases, self._values, self.per_rank):
            if fqn in names:
                raise self._naming_error(fqn, _USED_TWICE)
            names.add(fqn)
        tensors = [*self.tensors.values()]
        return ForeignState(
            tensors,
            tree,
            self._values,
            {},
            self._aliases,
            self.per_rank,
            valid_step,
            self.versions,
            self.has_text_keys,
        )

    def _reserve(self, path: Path) -> None:
        """Record a path. IncompatibleError if its name is invalid, or already used."""
        fqn = join_path(path)
        if fqn in self._paths:
            raise self._naming_error(fqn, _USED_TWICE)
        if path:
            self._check_name(fqn, join_path(path[:-1]))
        self._paths[fqn] = path

    def _select(self, fqn: str, value: object, budget: PickleBudget, depth: int) -> object:
        """Return a value without the dict entries that the selection excludes."""
        if (
            self._selection.is_everything
            or not isinstance(value, dict)
            or container_kind(value) is None
        ):
            return value
        _check_depth(depth)
        names = {key: child_name(fqn, key) for key in value}
        budget.spend(sum(_NAME_COST + len(name) for name in names.values()))
        chosen = [key for key, name in names.items() if not self.excludes(name)]
        items = ((key, self._select(names[key], value[key], budget, depth + 1)) for key in chosen)
        selected = create_container(container_kind(value) or "dict", items)
        if (metadata := getattr(value, "_metadata", None)) is not None:
            selected._metadata = metadata  # type: ignore[attr-defined]
        return selected

    def _add(self, fqn: str, value: object, pickled: Pickled, depth: int, part_of: str) -> None:
        _check_depth(depth)
        if isinstance(value, TensorView):
            pickled.budget.spend(_NAME_COST + len(fqn))
            self._add_tensor(fqn, value, pickled)
            return
        if not _contains_tensors(value, self._has_tensors, 0):
            self._values[fqn] = self._to_plain(fqn, value, pickled.budget, part_of)
            return
        pickled.budget.spend(_NAME_COST + len(fqn))
        kind, entries = container_kind(value), container_entries(value)
        if kind is None or entries is None:
            raise self._naming_error(fqn, f"a {type(value).__name__} that contains tensors")
        if strange := [key for key in entries if type(key) not in (str, int)]:
            raise self._naming_error(fqn, f"a container with {_describe_key(strange[0])}")
        self._nodes.append(Node(fqn, kind, tuple(entries)))
        self.add_versions(fqn, value, entries, pickled.budget)
        part_of = part_of or ("" if isinstance(value, Mapping) else fqn)  # see `_find_unknown`
        for key, child in entries.items():
            name = child_name(fqn, key)
            self._check_name(name, fqn)
            if name in self.tensors or name in self._values or name in self._aliases:
                raise self._naming_error(name, _USED_TWICE)
            self._add(name, child, pickled, depth + 1, part_of)

    def _add_tensor(self, fqn: str, view: TensorView, pickled: Pickled) -> None:
        chunk = pickled.locate(view, fqn)
        source = chunk.file if chunk.data is None else id(chunk.data)
        key = (source, chunk.start, view.dtype, view.shape, view.strides)
        first = self._first.setdefault(key, fqn) if 0 not in view.shape else fqn
        if first != fqn:
            self._aliases[fqn] = first
            return
        self.tensors[fqn] = ForeignTensor(fqn, view.dtype, view.shape, (chunk,))

    def _to_plain(self, fqn: str, value: object, budget: PickleBudget, part_of: str = "") -> object:
        """Return a value as it is stored; None if it cannot be stored and is not needed."""
        try:
            if (unknown := _find_unknown(value, fqn, part_of, set(), 0)) is not None:
                # An optimizer is useless without its groups: the remedy excludes all of it.
                whole = excluded_names(unknown[0].partition(".param_groups")[0])
                remedy = f"leave it out ({whole}), or save it again without that"
                raise IncompatibleError(f"{unknown[0]} {unknown[1]}; {remedy}")
            finished = _resolve_arrays(value, budget, 0)
            check_plain(finished, fqn)
        except (IncompatibleError, TypeError) as error:
            if not self._needs(fqn):
                return None
            raise IncompatibleError(f"{self._label}: {error}") from None
        return finished

    def _check_name(self, fqn: str, above: str) -> None:
        if len(fqn) > MAX_FQN_CHARS or not is_text(fqn) or not fqn.removeprefix(f"{above}."):
            raise self._naming_error(fqn[:100] or "''", "an empty, too long or invalid name")

    def _naming_error(self, fqn: str, why: str) -> IncompatibleError:
        return IncompatibleError(
            f"{self._label}: {fqn or 'the state'} is {why}: change it with the library that "
            f"wrote it"
        )


def _find_unknown(
    value: object, fqn: str, part_of: str, visited: set[int], depth: int
) -> tuple[str, UnknownObject] | None:
    """Return the first unknown object in a value, and the name by which it can be excluded.

    Parts of a list cannot be excluded. In one, the name is `part_of`: that of the outermost list.
    Each container is visited once; `visited` has their ids.
    """
    _check_depth(depth)
    if isinstance(value, NumpyArray) and value.value is None:
        reason = f"is a numpy array of dtype {value.dtype}, which cannot be stored"
        value = UnknownObject("numpy.ndarray", reason)
    if isinstance(value, UnknownObject):
        return part_of or fqn, value
    if id(value) in visited:
        return None
    visited.add(id(value))
    if isinstance(value, Mapping):
        keys = (key for key in value if isinstance(key, UnknownObject))
        if (unknown := next(keys, None)) is not None:
            return part_of or fqn, unknown
        inner = ((child_name(fqn, key), child) for key, child in value.items())
    else:
        part_of = part_of or fqn
        members = value if isinstance(value, set | frozenset) else _children(value)
        inner = ((fqn, child) for child in members)
    unknowns = (_find_unknown(child, name, part_of, visited, depth + 1) for name, child in inner)
    return next((entry for entry in unknowns if entry is not None), None)


def _describe_key(key: object) -> str:
    return key.name if isinstance(key, UnknownObject) else f"keys of {type(key).__name__}"


def _check_depth(depth: int) -> None:
    if depth > MAX_DEPTH:
        raise ValueError(f"nested deeper than {MAX_DEPTH} levels, or contains itself")


def _children(value: object) -> Iterable[object]:
    if isinstance(value, Mapping):
        return value.values()
    return value if type(value) in (list, tuple) or hasattr(value, "maxlen") else ()  # type: ignore[return-value]


def _contains_tensors(value: object, results: dict[int, bool], depth: int) -> bool:
    """Return True if a value contains a tensor. Each container is visited once."""
    if isinstance(value, TensorView):
        return True
    if id(value) not in results:
        _check_depth(depth)
        results[id(value)] = False
        results[id(value)] = any(_contains_tensors(v, results, depth + 1) for v in _children(value))
    return results[id(value)]


def _resolve_arrays(value: Any, budget: PickleBudget, depth: int) -> object:
    """Return a value with an `ArrayValue` in place of each `NumpyArray`."""
    _check_depth(depth)
    budget.spend(8 + _stored_nbytes(value))
    if isinstance(value, NumpyArray):
        assert value.value is not None, "`_find_unknown` has found it"
        budget.spend(len(value.value.data))
        return value.value
    if type(value) is deque:
        return deque((_resolve_arrays(item, budget, depth + 1) for item in value), value.maxlen)
    entries, kind = container_entries(value), container_kind(value)
    if entries is None or kind is None:
        return value
    return create_container(
        kind, ((k, _resolve_arrays(v, budget, depth + 1)) for k, v in entries.items())
    )


def _stored_nbytes(value: object) -> int:
    """Return the approximate stored size of a value, without the items of a container.

    A value is stored again for each reference, but a stream repeats a reference in two bytes.
    """
    if isinstance(value, int):
        return value.bit_length() // 8
    if isinstance(value, Mapping | set | frozenset):  # keys and members are not containers
        return sum(8 + _stored_nbytes(item) for item in value)
    if isinstance(value, range):
        return sum(map(_stored_nbytes, (value.start, value.stop, value.step)))
    if isinstance(value, Device | NumpyScalar):
        return len(value.name if isinstance(value, Device) else value.data)
    text = str(value) if isinstance(value, PurePath) else value
    return len(text) if isinstance(text, str | bytes) else 0
