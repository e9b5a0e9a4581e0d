"""Find the keys that an object's `load_state_dict` cannot do without, before it is called.

A load fills tensors before it calls `load_state_dict`. A KeyError there would come too late. So
the source of the method is read, not run. In doubt a key is not required.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator
from inspect import getattr_static, isfunction
from textwrap import dedent

_METHOD = "load_state_dict"

# Of methods that call each other.
_MAX_DEPTH = 3

# Calls that return all entries of their argument.
_COPIES = frozenset({"dict", "copy", "deepcopy"})


def find_missing_keys(
    owner: object, live: Collection[object], saved: Collection[object]
) -> tuple[str, ...]:
    """Return the keys of the live state that were not saved, and that `load_state_dict` reads.

    An object with a key in its live state is in the mode in which it reads that key.
    """
    missing = [key for key in live if isinstance(key, str) and key not in saved]
    read = read_keys(type(owner)) if missing else frozenset()
    return tuple(key for key in missing if key in read)


def read_keys(cls: type) -> frozenset[str]:
    """Return the keys that the method of a class reads without a test or a default."""
    classes = [base for base in cls.__mro__ if _METHOD in vars(base)]
    keys: set[str] = set()
    for base in classes:
        reader = _Reader(vars(base)[_METHOD], cls)
        keys |= reader.keys
        if not reader.calls_super:
            break
    return frozenset(keys)


class _Reader:
    """The keys that one method reads from its argument, statement by statement."""

    def __init__(self, method: Callable[..., object], cls: type, depth: int = 0) -> None:
        self._cls, self._depth = cls, depth
        self.keys: set[str] = set()
        self.calls_super = False
        self._names: set[str] = set()
        self._given: set[str] = set()
        if (function := _parse(method)) is not None and len(function.args.args) > 1:
            self._names.add(function.args.args[1].arg)
            self._read_block(function.body)

    def _read_block(self, statements: Iterable[ast.stmt]) -> bool:
        """Read statements in order; return False if those after them may not run."""
        return all(self._read_statement(statement) for statement in statements)

    def _read_statement(self, statement: ast.stmt) -> bool:
        match statement:
            case ast.If(test, body, orelse) if not self._mentions(test):
                # If the live state has a key, the object is in the mode that reads it.
                self._read_expression(test)
                for block in (body, orelse):
                    self._read_block(block)
                return True
            case ast.With(items, body) if not any("suppress" in ast.dump(i) for i in items):
                return self._read_block(body)
            case ast.Assign([ast.Name(name)], value) if self._is_all(value):
                self._names.add(name)
                return True
            case ast.Assign() | ast.AugAssign() | ast.AnnAssign() | ast.Expr() | ast.Return():
                self._read_expression(statement)
            case ast.For(ast.Name(name), ast.Tuple(items) | ast.List(items), body):
                self._read_loop(name, items, body)
            case ast.For(_, sequence):
                self._read_expression(sequence)
        # The bodies of all others may not run: loops, handlers of errors, tests of the argument.
        self._given |= set(self._given_keys(statement))
        has_return = any(isinstance(node, ast.Return) for node in ast.walk(statement))
        return not has_return and not self._is_replaced(statement)

    def _read_loop(self, name: str, items: Iterable[ast.expr], body: Iterable[ast.stmt]) -> None:
        """Read a loop over names of keys that are written out."""
        keys = [item.value for item in items if isinstance(item, ast.Constant)]
        for node in (node for statement in body for node in _evaluated(statement)):
            match node:
                case ast.Subscript(ast.Name(argument), ast.Name(key), ast.Load()):
                    if argument in self._names and key == name:
                        self.keys |= {*map(str, keys)} - self._given

    def _read_expression(self, tree: ast.AST) -> None:
        for node in _evaluated(tree):
            match node:
                case ast.Subscript(
                    ast.Name(name), ast.Constant(str() as key), ast.Load()
                ) | ast.Call(ast.Attribute(ast.Name(name), "pop"), [ast.Constant(str() as key)]):
                    if name in self._names and key not in self._given:
                        self.keys.add(key)
                case ast.Call(ast.Attribute(ast.Call(ast.Name("super")), "load_state_dict"), [arg]):
                    self.calls_super = self.calls_super or self._is_all(arg)
                case ast.Call(ast.Attribute(ast.Name("self"), name), [arg, *_]):
                    if self._is_all(arg):
                        self._read_further(name)

    def _read_further(self, name: str) -> None:
        """Read another method of the class, which gets the whole argument as its first one."""
        function = getattr_static(self._cls, name, None)
        if isfunction(function) and self._depth < _MAX_DEPTH:
            reader = _Reader(function, self._cls, self._depth + 1)
            self.keys |= reader.keys - self._given
            self._given |= reader._given

    def _given_keys(self, statement: ast.stmt) -> Iterator[str]:
        """Yield the keys that a statement adds to the argument."""
        for node in ast.walk(statement):
            match node:
                case ast.Subscript(ast.Name(), ast.Constant(str() as key), ast.Store()):
                    yield key
                case ast.Call(ast.Attribute(_, "setdefault"), [ast.Constant(str() as key), _]):
                    yield key

    def _is_all(self, value: ast.expr) -> bool:
        """Return True for the argument of the method, or a copy of it."""
        match value:
            case ast.Name(name):
                return name in self._names
            case ast.Call(ast.Name(copy) | ast.Attribute(_, copy), args):
                parts = [
                    *args,
                    *([value.func.value] if isinstance(value.func, ast.Attribute) else []),
                ]
                return copy in _COPIES and any(map(self._is_all, parts))
        return False

    def _is_replaced(self, statement: ast.stmt) -> bool:
        """Return True if the argument may have other keys after a statement."""
        for node in ast.walk(statement):
            match node:
                case ast.Name(name, ast.Store()) if name in self._names:
                    return True
                case ast.Call(ast.Attribute(ast.Name(name), "update")) if name in self._names:
                    return True
        return False

    def _mentions(self, test: ast.expr) -> bool:
        return any(isinstance(node, ast.Name) and node.id in self._names for node in ast.walk(test))


def _parse(method: Callable[..., object]) -> ast.FunctionDef | None:
    """Return the syntax tree of a method; None if its source is not there."""
    try:
        (function,) = ast.parse(dedent(inspect.getsource(inspect.unwrap(method)))).body
    except (OSError, TypeError, ValueError, SyntaxError):
        return None
    return function if isinstance(function, ast.FunctionDef) else None


def _evaluated(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that are always evaluated: no later part of `and`, no body of a loop."""
    yield tree
    match tree:
        case ast.BoolOp(_, [first, *_]):
            parts: Iterable[ast.AST] = [first]
        case ast.IfExp(test):
            parts = [test]
        case ast.Lambda():
            parts = []
        case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
            parts = [tree.generators[0].iter]
        case _:
            parts = ast.iter_child_nodes(tree)
    for part in parts:
        yield from _evaluated(part)
