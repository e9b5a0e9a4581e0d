"""What an object has, its constructor shows: no attribute is born anywhere else."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache

from package_trees import package_trees

Functions = dict[str, ast.FunctionDef | ast.AsyncFunctionDef]


def classes() -> Iterator[tuple[str, ast.ClassDef]]:
    for module, tree in package_trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                yield f"{module}:{node.name}", node


@cache
def methods(cls: ast.ClassDef) -> Functions:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name: node for node in cls.body if isinstance(node, kinds)}


def of_self(node: ast.AST) -> str | None:
    """Return the attribute's name if this is `self.name`."""
    is_own = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    return node.attr if is_own and node.value.id == "self" else None  # type: ignore[attr-defined]


@cache
def stored(function: ast.AST) -> set[str]:
    """Return the attributes of `self` that get a value in a function."""
    declared = {
        id(node.target)
        for node in ast.walk(function)
        if isinstance(node, ast.AnnAssign) and node.value is None
    }
    return {
        name
        for node in ast.walk(function)
        if isinstance(getattr(node, "ctx", None), ast.Store) and id(node) not in declared
        if (name := of_self(node)) is not None
    }


@cache
def called(function: ast.AST) -> set[str]:
    calls = (node.func for node in ast.walk(function) if isinstance(node, ast.Call))
    return {name for call in calls if (name := of_self(call)) is not None}


@cache
def constructors(cls: ast.ClassDef) -> set[str]:
    """Return the names of the methods that make an object, and of those that only they call."""
    own = methods(cls)
    found = {"__init__", "__new__"} & own.keys()
    while True:
        others = {name for n in own.keys() - found for name in called(own[n])}
        more = {name for n in found for name in called(own[n])} & own.keys() - others - found
        if not more:
            return found
        found |= more


@cache
def born(cls: ast.ClassDef) -> set[str]:
    """Return the attributes that an object has once it is made, and those of its class."""
    own = methods(cls)
    fields = {node.target for node in cls.body if isinstance(node, ast.AnnAssign)}
    values = {name for node in cls.body if isinstance(node, ast.Assign) for name in node.targets}
    names = {node.id for node in (*fields, *values) if isinstance(node, ast.Name)}
    setters = {n for n in own if any(isinstance(d, ast.Attribute) for d in own[n].decorator_list)}
    return names.union(setters, *(stored(own[name]) for name in constructors(cls)))


def born_late() -> list[str]:
    found = list(classes())
    of_class = {cls.name: cls for _, cls in found}
    late = []
    for where, cls in found:
        bases, known = [cls], set[str]()
        for one in bases:
            known |= born(one)
            names = (base.id for base in one.bases if isinstance(base, ast.Name))
            bases += [of_class[name] for name in names if name in of_class]
        for name, function in methods(cls).items():
            if name not in constructors(cls):
                late += [f"{where}.{name}: {one}" for one in stored(function) - known]
    return late


def test_no_attribute_is_born_outside_a_constructor() -> None:
    assert born_late() == []
