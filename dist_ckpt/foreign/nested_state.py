"""What another system has pickled, nested as it was, as the tensors and values of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from dist_ckpt.errors import CorruptError, IncompatibleError
from dist_ckpt.foreign.restricted_pickle import PickleBudget
from dist_ckpt.foreign.torch_pickles import NumpyArray, TensorView
from dist_ckpt.foreign.virtual_checkpoint import ForeignChunk, ForeignTensor
from dist_ckpt.format.catalog_json import MAX_FQN_CHARS
from dist_ckpt.format.geometry import Region
from dist_ckpt.format.index import Node
from dist_ckpt.format.plain_encoder import check_plain
from dist_ckpt.format.strict_json import is_text
from dist_ckpt.state.containers import MAX_DEPTH, PathKey, container, entries_of, join, kind_of

Path = tuple[PathKey, ...]

# What a name costs beside its characters: it has a record of its own.
_OF_NAMES = 64

# Where a tensor's elements lie: the file, and from which byte on.
Locate = Callable[[TensorView, str], tuple[str, int]]


def tree_of(paths: Iterable[Path]) -> tuple[Node, ...]:
    """Return the containers of a nested state; one whose keys are numbers is a list."""
    keys: dict[Path, dict[PathKey, None]] = {(): {}}
    for path in paths:
        for depth, key in enumerate(path):
            keys.setdefault(path[:depth], {})[key] = None
    return tuple(Node(".".join(map(str, path)), *_container(found)) for path, found in keys.items())


def _container(keys: Iterable[PathKey]) -> tuple[str, tuple[PathKey, ...]]:
    numbers = sorted(key for key in keys if isinstance(key, int))
    if numbers and numbers == [*range(len([*keys]))]:
        return "list", tuple(numbers)
    return "dict", tuple(keys)


class Nested:
    """What is found in files, name by name; `what` names them in errors.

    A container that holds tensors is a node of the tree, everything else is a value. A tensor that
    is another one as well is an alias of the first. IncompatibleError for what no checkpoint
    holds, with its name.
    """

    def __init__(self, what: str) -> None:
        self.tensors: dict[str, ForeignTensor] = {}
        self.aliases: dict[str, str] = {}
        self.values: dict[str, object] = {}
        self.nodes: list[Node] = []
        self._what = what
        self._first: dict[object, str] = {}
        self._known: dict[int, bool] = {}

    def add(self, fqn: str, value: object, locate: Locate, budget: PickleBudget) -> None:
        """Add what has a name, and what is in it."""
        try:
            self._known = {}  # by identity, of what lives as long as the value
            self._add(fqn, value, locate, budget, 0)
        except ValueError as error:
            raise CorruptError(f"{self._what}: {fqn[:100] or 'the state'}: {error}") from None

    def _add(
        self, fqn: str, value: object, locate: Locate, budget: PickleBudget, depth: int
    ) -> None:
        _check_depth(depth)
        if isinstance(value, TensorView):
            budget.spend(_OF_NAMES + len(fqn))
            self._add_tensor(fqn, value, locate)
            return
        if not _holds_tensors(value, self._known, 0):
            self.add_value(fqn, value, budget)
            return
        budget.spend(_OF_NAMES + len(fqn))
        kind, entries = kind_of(value), entries_of(value)
        if kind is None or entries is None:
            raise self._refused(fqn, f"a {type(value).__name__} that holds tensors")
        for key in entries:
            if type(key) not in (str, int):
                raise self._refused(fqn, f"a container with keys of {type(key).__name__}")
        self.nodes.append(Node(fqn, kind, tuple(entries)))
        for key, child in entries.items():
            self._check_name(join(fqn, key), fqn)
            self._add(join(fqn, key), child, locate, budget, depth + 1)

    def _add_tensor(self, fqn: str, view: TensorView, locate: Locate) -> None:
        file, start = locate(view, fqn)
        key = (file, start, view.dtype, view.shape, view.strides)
        first = self._first.setdefault(key, fqn) if 0 not in view.shape else fqn
        if first != fqn:
            self.aliases[fqn] = first
            return
        strides = None if view.is_contiguous else view.strides
        chunk = ForeignChunk(Region.whole(view.shape), file, start, strides)
        self.tensors[fqn] = ForeignTensor(fqn, view.dtype, view.shape, (chunk,))

    def add_value(self, fqn: str, value: object, budget: PickleBudget) -> None:
        """Add plain data, which holds no tensor."""
        made = _finished(value, budget, 0)
        try:
            check_plain(made, fqn)
        except TypeError as error:
            raise IncompatibleError(f"{self._what}: {error}") from None
        self.values[fqn] = made

    def _check_name(self, fqn: str, above: str) -> None:
        if len(fqn) > MAX_FQN_CHARS or not is_text(fqn) or not fqn.removeprefix(f"{above}."):
            raise self._refused(fqn[:100] or "''", "a name that is empty, too long or no text")
        if fqn in self.tensors or fqn in self.values or fqn in self.aliases:
            raise self._refused(fqn, "the name of two things: rename one")

    def _refused(self, fqn: str, why: str) -> IncompatibleError:
        return IncompatibleError(
            f"{self._what}: {fqn or 'the state'} is {why}: change it with the library that wrote it"
        )


def _check_depth(depth: int) -> None:
    if depth > MAX_DEPTH:
        raise ValueError(f"nested deeper than {MAX_DEPTH} levels, or contains itself")


def _inner(value: object) -> Iterable[object]:
    if isinstance(value, Mapping):
        return value.values()
    return value if type(value) in (list, tuple) or hasattr(value, "maxlen") else ()  # type: ignore[return-value]


def _holds_tensors(value: object, known: dict[int, bool], depth: int) -> bool:
    """Say whether there is a tensor in a value, looking into each container once."""
    if isinstance(value, TensorView):
        return True
    if id(value) not in known:
        _check_depth(depth)
        known[id(value)] = False
        known[id(value)] = any(_holds_tensors(v, known, depth + 1) for v in _inner(value))
    return known[id(value)]


def _finished(value: Any, budget: PickleBudget, depth: int) -> object:
    """Return a value with arrays in place of what stood for them."""
    _check_depth(depth)
    budget.spend(8 + (len(value) if type(value) in (str, bytes) else 0))
    if isinstance(value, NumpyArray):
        if value.value is None:
            raise ValueError("an array without its data")
        budget.spend(len(value.value.data))
        return value.value
    entries, kind = entries_of(value), kind_of(value)
    if entries is None or kind is None:
        budget.spend(len(value) if hasattr(value, "__len__") else 0)
        return value
    return container(kind, ((k, _finished(v, budget, depth + 1)) for k, v in entries.items()))
