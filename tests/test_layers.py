"""Imports point one way: the groups are read from docs/architecture.md, so that it stays true."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = "dist_ckpt"

# A module imports its own group and those after it.
GROUPS = ("use", "act", "seams", "plan", "format", "base")
PURE = ("plan", "format", "base")
THIRD_PARTY_OF_PURE = {"msgpack", "xxhash"}
TORCH_FREE = (
    "dist_ckpt",
    "dist_ckpt.checkpoint",
    "dist_ckpt.verifier",
    "dist_ckpt.cli",
    "dist_ckpt.store_channel",
    "dist_ckpt.key_server",
    "dist_ckpt.background_writer",
    "dist_ckpt.writer_process",
    "dist_ckpt.kept_saves",
    "dist_ckpt.snapshot_storage",
    "dist_ckpt.surviving_writers",
)

# The front door imports what is asked of it; nothing else is lazy without saying why.
LAZY_MODULE = "dist_ckpt"
LAZY_BECAUSE = re.compile(r"# noqa: PLC0415\s+\(.{10,}\)")


@dataclass(frozen=True)
class Import:
    """One imported name: `module` is the module that holds it."""

    importer: str
    module: str
    line: int
    text: str
    where: Literal["top", "function", "typing"]

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.module}"


def imports_of(name: str, source: str, modules: Mapping[str, object]) -> Iterator[Import]:
    """Yield what a module imports: at the top, inside functions, for type checking only."""
    lines = source.splitlines()
    tree = ast.parse(source)
    where: dict[ast.AST, Literal["function", "typing"]] = {}
    for block in ast.walk(tree):
        if isinstance(block, ast.FunctionDef):
            where |= dict.fromkeys(ast.walk(block), "function")
        elif isinstance(block, ast.If) and "TYPE_CHECKING" in ast.unparse(block.test):
            where |= dict.fromkeys(ast.walk(block), "typing")
    for node in ast.walk(tree):
        for module in modules_named_by(node, modules):
            text = lines[node.lineno - 1]
            yield Import(name, module, node.lineno, text, where.get(node, "top"))


def modules_named_by(node: ast.AST, modules: Mapping[str, object]) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    if node.level:
        return [f"{'.' * node.level}{node.module or ''}"]
    module = node.module or ""
    submodules = {f"{module}.{alias.name}" for alias in node.names} & set(modules)
    return sorted(submodules) or [module]


def modules_of_package() -> dict[str, str]:
    """Return the source of every module of the package, by its dotted name."""
    sources = {}
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        sources[name] = path.read_text()
    return sources


def groups_of_map(text: str) -> dict[str, str]:
    """Read the module map: a heading `### group: ...` and rows that begin with | `module.py` |."""
    groups: dict[str, str] = {}
    group = None
    for line in text.splitlines():
        if heading := re.match(r"### (\w+)", line):
            group = heading[1]
        elif (row := re.match(r"\| `([\w/]+)(\.py|/)` \|", line)) and group:
            groups[row[1].replace("/", ".")] = group
    return groups


SOURCES = modules_of_package()
MAP = groups_of_map((ROOT / "docs" / "architecture.md").read_text())
IMPORTS = [i for name, source in SOURCES.items() for i in imports_of(name, source, SOURCES)]


def group_of(module: str) -> str:
    """Return a module's group; a folder's row in the map holds for what is inside."""
    if module in (PACKAGE, f"{PACKAGE}.__main__"):
        return "use"
    short = module.removeprefix(f"{PACKAGE}.")
    return MAP.get(short) or MAP[short.split(".", maxsplit=1)[0]]


def is_ours(module: str) -> bool:
    return module.split(".", maxsplit=1)[0] == PACKAGE


def wrong_arrows(imports: list[Import]) -> list[str]:
    """Return the imports that point from a lower group to a higher one."""
    return [
        f"{i}: {group_of(i.importer)} -> {group_of(i.module)}"
        for i in imports
        if is_ours(i.module)
        and "testing" not in (group_of(i.importer), group_of(i.module))
        and GROUPS.index(group_of(i.importer)) > GROUPS.index(group_of(i.module))
    ]


def cycle_in(graph: Mapping[str, set[str]]) -> list[str]:
    """Return the modules of one cycle of imports, or nothing."""
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return []
        for other in sorted(graph.get(module, ())):
            if found := visit(other, [*path, module]):
                return found
        done.add(module)
        return []

    for module in sorted(graph):
        if found := visit(module, []):
            return found
    return []


def lazy_imports(imports: list[Import]) -> list[str]:
    """Return the imports inside functions whose line does not say why."""
    return [
        str(i)
        for i in imports
        if i.where == "function" and i.importer != LAZY_MODULE and not LAZY_BECAUSE.search(i.text)
    ]


def top_level_graph(imports: list[Import]) -> dict[str, set[str]]:
    graph: dict[str, set[str]] = {name: set() for name in SOURCES}
    for i in imports:
        if i.where == "top":
            graph[i.importer].add(i.module)
    return graph


def an_import(importer: str, module: str, lazily: str = "") -> Import:
    where: Literal["top", "function"] = "function" if lazily else "top"
    return Import(f"{PACKAGE}.{importer}", module, 1, lazily, where)


def test_every_module_stands_in_the_map_and_the_map_names_no_other() -> None:
    in_map = {f"{PACKAGE}.{short}" for short in MAP}
    known = set(SOURCES) - {PACKAGE, f"{PACKAGE}.__main__"}
    folders = tuple(f"{row}." for row in in_map)
    assert sorted(m for m in known - in_map if not m.startswith(folders)) == []
    assert sorted(in_map - known) == []
    assert sorted(set(MAP.values()) - {*GROUPS, "testing"}) == []


def test_imports_point_one_way() -> None:
    assert wrong_arrows(IMPORTS) == []


def test_an_arrow_the_wrong_way_is_found() -> None:
    assert wrong_arrows([an_import("plan", "dist_ckpt.reader")])
    assert wrong_arrows([an_import("region", "dist_ckpt.plan")])
    assert not wrong_arrows([an_import("reader", "dist_ckpt.plan")])


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    graph = {m: {o for o in others if is_ours(o)} for m, others in top_level_graph(IMPORTS).items()}
    assert cycle_in(graph) == []
    assert cycle_in({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]


def test_nothing_in_the_package_imports_testing() -> None:
    users = [i for i in IMPORTS if i.module.startswith(f"{PACKAGE}.testing")]
    assert [str(i) for i in users if group_of(i.importer) != "testing"] == []


def test_pure_modules_import_no_third_party_but_msgpack_and_xxhash() -> None:
    foreign = [
        str(i)
        for i in IMPORTS
        if not is_ours(i.module)
        and group_of(i.importer) in PURE
        and i.module.split(".")[0] not in sys.stdlib_module_names | THIRD_PARTY_OF_PURE
    ]
    assert foreign == []


def test_imports_are_absolute_and_at_the_top() -> None:
    assert [str(i) for i in IMPORTS if i.module.startswith(".")] == []
    assert lazy_imports(IMPORTS) == []


def test_a_lazy_import_is_found_unless_it_says_why() -> None:
    assert lazy_imports([an_import("reader", "torch", "import torch")])
    said = "import torch  # noqa: PLC0415  (only who asks for a tensor pays for it)"
    assert not lazy_imports([an_import("reader", "torch", said)])


@pytest.mark.parametrize("front_door", TORCH_FREE)
def test_neither_torch_nor_numpy_is_reached_from(front_door: str) -> None:
    graph = top_level_graph(IMPORTS)
    reached: set[str] = set()
    assert front_door in list(SOURCES)
    new = {front_door}
    while new:
        reached |= new
        new = {other for m in new for other in graph.get(m, ())} - reached
    assert [m for m in sorted(reached) if m.split(".")[0] in ("torch", "numpy")] == []


@pytest.mark.multi_process
def test_importing_the_package_and_its_command_line_does_not_import_torch() -> None:
    code = f"import sys, {', '.join(TORCH_FREE)}; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        timeout=60,
        check=True,
        capture_output=True,
        text=True,
    )
    assert {"torch", "numpy"} & set(done.stdout.split()) == set()
