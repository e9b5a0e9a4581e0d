"""Read pickles of other systems without unpickling: names in them are never looked up.

This interprets the opcodes that Python writes for plain data. A name in the stream is only a key of
the caller's table. The table has values, and `PlaceholderFactory` functions that make plain data or
inert placeholders. Any other name is an error, or becomes an `UnknownObject`. Nothing is imported,
and no method that the stream names is called. The size of the stream bounds time and memory.

`pickletools.genops` does not parse the opcodes here. It reads lines and decimals of any length,
accepts text that is not UTF-8, and undoes escapes in names with a DeprecationWarning.
"""

from __future__ import annotations

import struct
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from dist_ckpt.errors import CorruptError, IncompatibleError

# Two bytes of a stream repeat a list or dict of any size. So the objects built from a stream may
# cost at most this multiple of its size, and `_FREE_NBYTES` more.
_MAX_EXPANSION = 64
_FREE_NBYTES = 1 << 16


@dataclass(frozen=True, slots=True, eq=False)
class PlaceholderFactory:
    """A function of dist_ckpt, which is called for a name in a stream.

    Its result may have a method `set_state`, which is called with the object's state, if the stream
    has one. Both raise ValueError or TypeError for invalid arguments.
    """

    name: str
    make: Callable[..., object]


@dataclass(slots=True, eq=False)
class PickledRecord:
    """The fields of an instance whose class is not looked up."""

    name: str
    fields: dict[str, object] = field(default_factory=dict)

    def set_state(self, state: object) -> None:
        """Set the fields."""
        if not isinstance(state, dict):
            raise TypeError(f"the state of a {self.name} is not a dict")
        self.fields = state


def record_factory(name: str, cls: type[PickledRecord] = PickledRecord) -> PlaceholderFactory:
    """Return the factory for instances of a class: records, which get their fields later."""

    def make(*args: object) -> PickledRecord:
        if args:
            raise TypeError(f"a {name} with arguments")
        return cls(name)

    return PlaceholderFactory(name, make)


@dataclass(slots=True, eq=False)
class UnknownObject:
    """An object that cannot be read: its name is not in the table, or there is a `reason`."""

    name: str
    reason: str = ""

    def __str__(self) -> str:
        return self.reason or f"names {self.name}, which is not run here: only plain data is read"


class PickleBudget:
    """The remaining cost of building objects from a stream. ValueError when it is spent."""

    def __init__(self, nbytes: int) -> None:
        self._left = _MAX_EXPANSION * nbytes + _FREE_NBYTES

    def spend(self, count: int) -> None:
        """Subtract a cost."""
        self._left -= count
        if self._left < 0:
            raise ValueError("its objects would be far more than its bytes")


def unknown_error(unknown: UnknownObject, label: str) -> IncompatibleError:
    """Return the error for an unknown object that cannot be excluded."""
    return IncompatibleError(f"{label} {unknown}; save it again without that")


def quote(value: object) -> str:
    """Return a short text of a value for messages; a number may be too long for `repr`."""
    if type(value) is int and value.bit_length() > 64:
        return "a number beyond 64 bits"
    if isinstance(value, str):
        return ascii(value[:60])
    return str(value) if type(value) in (int, bool, float) else f"a {type(value).__name__}"


_CALL_COST = 16

# The types of keys of a dict and members of a set. A file could choose the hashes of other types.
_HASHABLE_TYPES = (str, int, bool, bytes, type(None))

# A few bytes of the stream can make Python compare two long texts, or join a long name. So a long
# text costs its length each time, and names have a limit.
_LONG_TEXT_CHARS = 1 << 12
_MAX_NAME_CHARS = 1000


def read(
    data: bytes,
    table: Mapping[str, object],
    label: str,
    persistent: Callable[[object], object] | None = None,
    *,
    keep_unknown: bool = False,
) -> object:
    """Return the value of a pickle; `label` names it in errors.

    `table` has the allowed names, as "module name"; `persistent` resolves persistent ids. Any other
    name raises IncompatibleError. With `keep_unknown` it becomes an `UnknownObject` instead, as
    does everything built from it, so that the caller can report its location. CorruptError for an
    invalid stream.
    """
    try:
        return _Machine(data, table, persistent, PickleBudget(len(data)), keep_unknown).run()
    except _UnknownNameError as error:
        raise unknown_error(error.args[0], label) from None
    except IncompatibleError as error:
        raise IncompatibleError(f"{label}: {error}") from None
    except (ValueError, TypeError, IndexError, KeyError, OverflowError, struct.error) as error:
        raise CorruptError(f"{label}: not a pickle of plain data: {error}") from None


class _UnknownNameError(Exception):
    """A name in a stream that is not in the table. The argument is the `UnknownObject`."""


@dataclass(slots=True)
class _Machine:
    """The pickle machine for one stream: its stack, the stacks below its marks, and its memo."""

    data: bytes
    table: Mapping[str, object]
    resolve: Callable[[object], object] | None
    budget: PickleBudget
    keep_unknown: bool
    at: int = 0
    stack: list[Any] = field(default_factory=list)
    below: list[list[Any]] = field(default_factory=list)
    memo: dict[int, Any] = field(default_factory=dict)

    def run(self) -> object:
        data, steps = self.data, _STEPS
        while self.at < len(data):
            code = data[self.at]
            self.at += 1
            if code == _STOP:
                if self.below or len(self.stack) != 1:
                    raise ValueError("it ends within a value")
                return self.stack.pop()
            step = steps.get(code)
            if step is None:
                raise ValueError(f"opcode {code:#x} at byte {self.at - 1} is not for plain data")
            step(self)
        raise ValueError("it has no end")

    def take(self, count: int) -> bytes:
        end = self.at + count
        if count < 0 or end > len(self.data):
            raise ValueError(f"it ends within a value of {count} bytes")
        data = self.data[self.at : end]
        self.at = end
        return data

    def read_number(self, nbytes: int) -> int:
        return int.from_bytes(self.take(nbytes), "little")

    def read_line(self) -> str:
        end = self.data.find(b"\n", self.at, self.at + _MAX_NAME_CHARS)
        if end < 0:
            raise ValueError("a name does not end")
        line = self.take(end - self.at).decode()
        self.at += 1
        return line

    def _spend_on(self, items: Collection[object]) -> None:
        """Spend the cost of visiting items: they may be long, and referenced many times."""
        lengths = (len(item) for item in items if isinstance(item, str | bytes))
        self.budget.spend(len(items) + sum(n for n in lengths if n > _LONG_TEXT_CHARS))

    # --- what the opcodes do ------------------------------------------------------------------

    def push(self, value: object) -> None:
        self.stack.append(value)

    def push_integer(self, nbytes: int) -> None:
        self.push(int.from_bytes(self.take(nbytes), "little", signed=True))

    def push_mark(self) -> None:
        self.below.append(self.stack)
        self.stack = []

    def pop_to_mark(self) -> list[Any]:
        """Return the items above the last mark, and restore the stack below it."""
        items, self.stack = self.stack, self.below.pop()
        return items

    def pop(self) -> None:
        if self.stack:
            self.stack.pop()
        else:
            self.pop_to_mark()

    def push_tuple(self, count: int) -> None:
        items = [self.stack.pop() for _ in range(count)]
        self.push(tuple(reversed(items)))

    def extend(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is UnknownObject:
            return
        if type(target) not in (list, deque):
            raise TypeError("items for a value that is not a list")
        target.extend(items)

    def append(self) -> None:
        self.extend([self.stack.pop()])

    def set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is UnknownObject:
            return
        if not isinstance(target, dict) or len(items) % 2:
            raise TypeError("keys for a value that is not a dict")
        self._spend_on(items[::2])
        for key, value in zip(items[::2], items[1::2], strict=True):
            target[self._hashable_key(key)] = value

    def _hashable_key(self, key: object) -> object:
        """Return the key. With `keep_unknown`, return an `UnknownObject` for a bad key."""
        if not self.keep_unknown:
            _check_hashable(key)
        elif not _is_hashable(key):
            name = f"the key {quote(key)}"
            return UnknownObject(name, f"has {name}: only text and numbers of 64 bits are read")
        return key

    def set_item(self) -> None:
        value = self.stack.pop()
        self.set_items([self.stack.pop(), value])

    def add_items(self) -> None:
        items, target = self.pop_to_mark(), self.stack[-1]
        if type(target) is UnknownObject:
            return
        if type(target) is not set:
            raise TypeError("members for a value that is not a set")
        self._spend_on(items)
        target.update(check_members(items))

    def push_frozen_set(self) -> None:
        items = self.pop_to_mark()
        self._spend_on(items)
        self.push(frozenset(check_members(items)))

    def stack_name(self) -> None:
        name = self.stack.pop()
        module = self.stack.pop()
        if type(name) is not str or type(module) is not str:
            raise TypeError("a name that is not text")
        if len(module) + len(name) > _MAX_NAME_CHARS:
            raise ValueError(f"a name of {len(module) + len(name)} characters")
        self.look_up(module, name)

    def look_up(self, module: str, name: str) -> None:
        key = f"{module} {name}"
        unknown = UnknownObject(ascii(f"{module}.{name}"[:200])[1:-1])
        if key not in self.table and not self.keep_unknown:
            raise _UnknownNameError(unknown)
        self.push(self.table.get(key, unknown))

    def call_with_names(self) -> None:
        names = self.stack.pop()
        if type(names) is not dict:
            raise TypeError("argument names that are not a dict")
        if type(self.stack[-2]) is PlaceholderFactory and names:
            raise TypeError(f"a call of {quote(self.stack[-2])} with names")
        self.call()

    def call(self) -> None:
        args = self.stack.pop()
        maker = self.stack.pop()
        self.budget.spend(_CALL_COST * len(args) if type(args) is tuple else 0)
        if type(args) is tuple and (unknown := _find_unknown((maker, *args))) is not None:
            self.push(UnknownObject(unknown.name, unknown.reason))
            return
        if type(maker) is not PlaceholderFactory or type(args) is not tuple:
            raise TypeError(f"a call of {quote(maker)}")
        # The result may copy its arguments: a set takes a hundred bytes for each member.
        self.budget.spend(_CALL_COST * sum(len(a) for a in args if hasattr(a, "__len__")))
        for arg in args:
            self._spend_on(arg if isinstance(arg, list | tuple | dict) else ())
        self.push(maker.make(*args))

    def build(self) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        if type(target) is OrderedDict and type(state) is dict:
            # The versions of modules in a state dict; other attributes are dropped.
            target._metadata = state.get("_metadata")  # type: ignore[attr-defined]
        if type(target) in (OrderedDict, UnknownObject):
            return
        set_state = getattr(type(target), "set_state", None)
        if set_state is None:
            raise TypeError(f"a state for {quote(target)}")
        set_state(target, state)

    def persistent(self) -> None:
        if self.resolve is None:
            raise TypeError("a persistent id where none is allowed")
        identity = self.stack.pop()
        parts = identity if type(identity) is tuple else ()
        self.push(_find_unknown(parts) or self.resolve(identity))

    def put(self, nbytes: int) -> None:
        self.memo[self.read_number(nbytes)] = self.stack[-1]

    def memoize(self) -> None:
        self.memo[len(self.memo)] = self.stack[-1]

    def get(self, nbytes: int) -> None:
        self.push(self.memo[self.read_number(nbytes)])


def check_members(items: object) -> Iterator[object]:
    """Yield the members of a list or tuple. TypeError for one that no set or dict may have."""
    if not isinstance(items, list | tuple):
        raise TypeError(f"members that are {quote(items)}")
    for item in items:
        _check_hashable(item)
        yield item


def _find_unknown(parts: tuple[object, ...]) -> UnknownObject | None:
    return next((part for part in parts if isinstance(part, UnknownObject)), None)


def _is_hashable(key: object) -> bool:
    if type(key) is int:
        return key.bit_length() <= 64
    return type(key) in _HASHABLE_TYPES or isinstance(key, PickledRecord | UnknownObject)


def _check_hashable(key: object) -> None:
    if not _is_hashable(key):
        raise TypeError(f"the key {quote(key)}: only text and numbers of 64 bits are read")


_STOP = ord(".")

_STEPS: Mapping[int, Callable[[_Machine], object]] = {
    0x80: lambda m: m.take(1),  # the protocol
    0x95: lambda m: m.take(8),  # a frame
    ord("("): _Machine.push_mark,
    ord("0"): _Machine.pop,
    ord("1"): _Machine.pop_to_mark,
    ord("N"): lambda m: m.push(None),
    0x88: lambda m: m.push(True),  # noqa: FBT003
    0x89: lambda m: m.push(False),  # noqa: FBT003
    ord("J"): lambda m: m.push_integer(4),
    ord("K"): lambda m: m.push(m.read_number(1)),
    ord("M"): lambda m: m.push(m.read_number(2)),
    0x8A: lambda m: m.push_integer(m.read_number(1)),
    0x8B: lambda m: m.push_integer(m.read_number(4)),
    ord("G"): lambda m: m.push(struct.unpack(">d", m.take(8))[0]),
    0x8C: lambda m: m.push(m.take(m.read_number(1)).decode()),
    ord("X"): lambda m: m.push(m.take(m.read_number(4)).decode()),
    0x8D: lambda m: m.push(m.take(m.read_number(8)).decode()),
    ord("C"): lambda m: m.push(m.take(m.read_number(1))),
    ord("B"): lambda m: m.push(m.take(m.read_number(4))),
    0x8E: lambda m: m.push(m.take(m.read_number(8))),
    ord(")"): lambda m: m.push(()),
    ord("t"): lambda m: m.push(tuple(m.pop_to_mark())),
    0x85: lambda m: m.push_tuple(1),
    0x86: lambda m: m.push_tuple(2),
    0x87: lambda m: m.push_tuple(3),
    ord("]"): lambda m: m.push([]),
    ord("a"): _Machine.append,
    ord("e"): lambda m: m.extend(m.pop_to_mark()),
    ord("}"): lambda m: m.push({}),
    ord("s"): _Machine.set_item,
    ord("u"): lambda m: m.set_items(m.pop_to_mark()),
    0x8F: lambda m: m.push(set()),
    0x90: _Machine.add_items,
    0x91: _Machine.push_frozen_set,
    ord("c"): lambda m: m.look_up(m.read_line(), m.read_line()),
    0x93: _Machine.stack_name,
    ord("R"): _Machine.call,
    0x81: _Machine.call,  # makes an instance, which is a call here
    0x92: _Machine.call_with_names,
    ord("b"): _Machine.build,
    ord("Q"): _Machine.persistent,
    ord("q"): lambda m: m.put(1),
    ord("r"): lambda m: m.put(4),
    0x94: _Machine.memoize,
    ord("h"): lambda m: m.get(1),
    ord("j"): lambda m: m.get(4),
}
