"""Policies as text, such as `last(3) | best(2, min="val/loss")`: parse it, and write it.

    policy  = rule { "|" rule }
    rule    = name [ "(" [ value | name "=" value { "," ... } ] ")" ]
    value   = a number, a string in quotes, or a negative number

Python's parser reads the text, and only these forms are accepted. Nothing is evaluated.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

Constant = int | float | str
WrittenRule = tuple[str, tuple[Constant, ...], Mapping[str, Constant]]

MAX_CHARS = 4096


def parse_rules(text: str) -> list[WrittenRule]:
    """Return the rules of a text: name, values, values by name. ValueError for other content."""
    if len(text) > MAX_CHARS:
        raise ValueError(f"a policy of {len(text)} characters: the limit is {MAX_CHARS}")
    try:
        tree = ast.parse(text.strip(), mode="eval")
        return [_parse_rule(node, text) for node in _alternatives(tree.body)]
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"{text!r} is not a policy: {error}; write it as last(3) | ...") from None


def text_of(name: str, *values: Constant, **named: Constant | None) -> str:
    """Return a rule as text for `parse_rules`, without values that are None."""
    parts = [repr(value) for value in values]
    parts += [f"{key}={value!r}" for key, value in named.items() if value is not None]
    return f"{name}({', '.join(parts)})"


def _alternatives(node: ast.expr) -> Iterator[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        yield from _alternatives(node.left)
        yield from _alternatives(node.right)
    else:
        yield node


def _parse_rule(node: ast.expr, text: str) -> WrittenRule:
    if isinstance(node, ast.Name):
        return node.id, (), {}
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        part = ast.get_source_segment(text.strip(), node) or text
        raise ValueError(f"{part!r} is not a rule: write it as last(3)")
    named = {
        word.arg: _constant(word.value, text) for word in node.keywords if word.arg is not None
    }
    if len(named) != len(node.keywords):
        raise ValueError(f"{text!r}: write the values of a rule as value or name=value")
    return node.func.id, tuple(_constant(value, text) for value in node.args), named


def _constant(node: ast.expr, text: str) -> Constant:
    sign = 1
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        node, sign = node.operand, -1
    if isinstance(node, ast.Constant):
        if type(node.value) is int or type(node.value) is float:
            return sign * node.value
        if type(node.value) is str and sign == 1:
            return node.value
    part = ast.get_source_segment(text.strip(), node) or text
    raise ValueError(f"{part!r} is not a value: give a number, or a text in quotes")
