"""Imports point one way, from package to package; the folders say what belongs together."""

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

ROOT = Path(__file__).parents[2]
PACKAGE = "dist_ckpt"

# A package imports itself and those after it; what lies beside them is the top.
ORDER = (
    "cli",
    "background",
    "writer",
    "offline",
    "loading",
    "saving",
    "snapshots",
    "binding",
    "commit",
    "state",
    "comm",
    "shard_io",
    "storage",
    "memory",
    "planning",
    "format",
    "runtime",
    "top",
)
PURE = ("planning", "format", "top")
THIRD_PARTY_OF_PURE = {"msgpack", "xxhash"}
TORCH_FREE = (
    "dist_ckpt",
    "dist_ckpt.offline.checkpoint",
    "dist_ckpt.offline.verify",
    "dist_ckpt.cli",
    "dist_ckpt.comm.store_exchange",
    "dist_ckpt.comm.key_server",
    "dist_ckpt.writer.process",
    "dist_ckpt.background.writer_process",
    "dist_ckpt.snapshots.kept",
    "dist_ckpt.snapshots.overlay_storage",
    "dist_ckpt.background.survivors",
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


SOURCES = modules_of_package()
IMPORTS = [i for name, source in SOURCES.items() for i in imports_of(name, source, SOURCES)]


def package_of(module: str) -> str:
    """Return the folder of a module; the front doors are of the first one."""
    if module in (PACKAGE, f"{PACKAGE}.__main__"):
        return ORDER[0]
    folder = module.split(".")[1]
    return folder if (ROOT / PACKAGE / folder).is_dir() else "top"


def is_ours(module: str) -> bool:
    return module.split(".", maxsplit=1)[0] == PACKAGE


def wrong_arrows(imports: list[Import]) -> list[str]:
    """Return the imports that point from a lower group to a higher one."""
    return [
        f"{i}: {package_of(i.importer)} -> {package_of(i.module)}"
        for i in imports
        if is_ours(i.module)
        and "testing" not in (package_of(i.importer), package_of(i.module))
        and ORDER.index(package_of(i.importer))
        > ORDER.index("top" if i.module == PACKAGE else package_of(i.module))
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


def test_every_folder_has_its_place_and_says_what_it_is() -> None:
    folders = {p.parent.name: p for p in (ROOT / PACKAGE).glob("*/__init__.py")}
    assert sorted(folders) == sorted({*ORDER, "testing"} - {"top"})
    assert [n for n, p in folders.items() if not ast.get_docstring(ast.parse(p.read_text()))] == []


def test_imports_point_one_way() -> None:
    assert wrong_arrows(IMPORTS) == []


def test_an_arrow_the_wrong_way_is_found() -> None:
    assert wrong_arrows([an_import("plan", "dist_ckpt.shard_io.block_reader")])
    assert wrong_arrows([an_import("format.geometry", "dist_ckpt.planning.plan")])
    assert not wrong_arrows([an_import("loading.block_reader", "dist_ckpt.planning.plan")])


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    graph = {m: {o for o in others if is_ours(o)} for m, others in top_level_graph(IMPORTS).items()}
    assert cycle_in(graph) == []
    assert cycle_in({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]


def test_nothing_in_the_package_imports_testing() -> None:
    users = [i for i in IMPORTS if i.module.startswith(f"{PACKAGE}.testing")]
    assert [str(i) for i in users if package_of(i.importer) != "testing"] == []


def test_pure_modules_import_no_third_party_but_msgpack_and_xxhash() -> None:
    foreign = [
        str(i)
        for i in IMPORTS
        if not is_ours(i.module)
        and package_of(i.importer) in PURE
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
