"""The syntax trees of all modules of the package, parsed once for all tests that look at them."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[3] / "dist_ckpt"


@cache
def package_trees() -> Mapping[str, ast.Module]:
    """Return the tree of each module by its dotted name in the package; do not change them."""
    return {
        path.relative_to(PACKAGE).with_suffix("").as_posix().replace("/", "."): ast.parse(
            path.read_text()
        )
        for path in sorted(PACKAGE.rglob("*.py"))
    }
