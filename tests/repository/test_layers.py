"""Imports point one way, from package to package; the folders say what belongs together."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeGuard

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = "dist_ckpt"

# A package imports itself and those after it. All may import the top (errors, options, reports),
# which imports itself.
ORDER = (
    "cli",
    "html_report",
    "integrations",
    "checkpointer",
    "background",
    "writer",
    "averaging",
    "interop",
    "offline",
    "loading",
    "foreign",
    "saving",
    "snapshots",
    "binding",
    "data",
    "runs",
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

# What a reader can take in: `dist_ckpt` itself, one folder of it, one module.
# One for each thing that a reader looks for: pages about checkpoints are none of the command line's
# business, nor of the packages that they are about.
MOST_FOLDERS = 26
MOST_FILES_BESIDE_THEM = 6
MOST_MODULES = 16
MOST_LINES = 400

# They decide, and touch nothing: whoever calls them hands in values and gets values. So do two
# modules beside them.
PURE = ("planning", "format")
PURE_TOO = (
    "dist_ckpt.binding.saved_tree",
    "dist_ckpt.state.containers",
)
COMPUTES = {
    *("__future__", "bisect", "collections", "contextlib", "dataclasses", "datetime", "enum"),
    *("fnmatch", "functools", "heapq", "itertools", "json", "math", "numbers", "operator", "re"),
    *("struct", "types", "typing", "msgpack", "msgspec", "xxhash"),
    *("os", "pathlib", "sys", "tomllib"),  # for paths as values, and `ShardingConfig.from_file`
}
OF_OS = {"os.PathLike", "os.name", "os.fspath"}
OPENING = r"\bopen\(|\.(read|write)_(text|bytes)\("
OPENS_A_FILE = {"dist_ckpt.planning.sharding_config"}
THIRD_PARTY_OF_ALL = {"msgpack", "xxhash", "msgspec"}

# Whoever looks at a checkpoint, checks it or writes it in the background needs no torch.
WITHOUT_TORCH = (
    *("cli", "html_report", "writer", "offline", "snapshots", "runs", "commit", "comm"),
    *("shard_io", "storage", "planning", "format", "runtime", "top"),
)
WITH_TORCH = {
    "dist_ckpt.comm.gloo",
    "dist_ckpt.comm.process_group",
    "dist_ckpt.runtime.torch_fsdp1",
    "dist_ckpt.runtime.torch_private",
}
# Of other packages, what starts and ends writers: it runs before a trainer has anything to save.
# Some formats of other systems are read without it.
WITHOUT_TORCH_TOO = (
    "dist_ckpt.background.former_writers",
    "dist_ckpt.background.writer_process",
    "dist_ckpt.interop.hf",
    "dist_ckpt.interop.imports",
    "dist_ckpt.interop.shrew",
)

# They look for torch or numpy when somebody asks for what needs it.
TORCH_OR_NUMPY_IF_THERE = {
    "dist_ckpt.memory.host_array",
    "dist_ckpt.state.plain_torch",
    "dist_ckpt.runtime.rng",
}

# The front door imports what is asked of it; nothing else is lazy without saying why.
FRONT_DOORS = (PACKAGE, f"{PACKAGE}.__main__")
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
        if isinstance(block, ast.FunctionDef | ast.AsyncFunctionDef):
            where |= dict.fromkeys(ast.walk(block), "function")
        elif isinstance(block, ast.If) and "TYPE_CHECKING" in ast.unparse(block.test):
            where |= dict.fromkeys(ast.walk(block), "typing")
    for node in ast.walk(tree):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        for module in modules_named_by(node, modules):
            text = lines[node.lineno - 1]
            yield Import(name, module, node.lineno, text, where.get(node, "top"))


def modules_named_by(node: ast.Import | ast.ImportFrom, modules: Mapping[str, object]) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if node.level:
        return [f"{'.' * node.level}{node.module or ''}"]
    module = node.module or ""
    names = {f"{module}.{alias.name}" for alias in node.names}
    submodules = names & set(modules)
    return sorted(submodules | ({module} if names - submodules else set()))


def modules_of_package() -> dict[str, str]:
    """Return the source of every module of the package, by its dotted name."""
    sources = {}
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        sources[name] = path.read_text()
    return sources


FOLDERS = {path.parent.name: path for path in sorted((ROOT / PACKAGE).glob("*/__init__.py"))}
SOURCES = modules_of_package()
IMPORTS = [i for name, source in SOURCES.items() for i in imports_of(name, source, SOURCES)]


def package_of(module: str) -> str:
    """Return the folder of a module; the front doors, which import anything, are of the first."""
    if module in FRONT_DOORS:
        return ORDER[0]
    folder = module.split(".")[1]
    return folder if folder in FOLDERS else "top"


def is_ours(module: str) -> bool:
    return module.split(".", maxsplit=1)[0] == PACKAGE


def wrong_arrows(imports: list[Import]) -> list[str]:
    """Return the imports that point from a lower package to a higher one."""
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
        if i.where == "function" and i.importer != PACKAGE and not LAZY_BECAUSE.search(i.text)
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


def line_of(package: str) -> str:
    """Return what a package says that it is: the first line of its docstring."""
    doc = ast.get_docstring(ast.parse(FOLDERS[package].read_text())) or ""
    return doc.split("\n")[0]


def reached_from(module: str, graph: Mapping[str, set[str]]) -> set[str]:
    """Return all that is imported with a module: a package comes with each of its modules."""
    reached: set[str] = set()
    new = {module}
    while new:
        reached |= new
        folders = {m.rpartition(".")[0] for m in new if is_ours(m) and m != PACKAGE}
        new = ({other for m in new for other in graph.get(m, ())} | folders) - reached
    return reached


def test_every_folder_is_a_package_that_has_its_place_and_says_what_it_is() -> None:
    inside = {p.name for p in (ROOT / PACKAGE).iterdir() if p.is_dir()} - {"__pycache__"}
    assert inside == FOLDERS.keys()
    assert FOLDERS.keys() <= {*ORDER, "testing"} - {"top"}
    assert [name for name in FOLDERS if not line_of(name).endswith(".")] == []


def test_no_folder_and_no_module_is_more_than_a_reader_can_take_in() -> None:
    files = {p.name for p in (ROOT / PACKAGE).iterdir() if p.is_file()}
    assert len(FOLDERS) <= MOST_FOLDERS
    assert len(files) <= MOST_FILES_BESIDE_THEM, files
    for name, path in FOLDERS.items():
        assert [p for p in path.parent.iterdir() if p.is_dir() and p.name != "__pycache__"] == []
        modules = {p.stem for p in path.parent.glob("*.py")} - {"__init__", "__main__"}
        assert len(modules) <= MOST_MODULES, name
    long = {name: len(text.splitlines()) for name, text in SOURCES.items()}
    assert {name: lines for name, lines in long.items() if lines > MOST_LINES} == {}


def test_the_architecture_lists_the_packages_in_the_order_of_their_imports() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\| `(\w+)/` \| (.*) \|$", text, flags=re.M)
    order = [name for name in (*ORDER, "testing") if name in FOLDERS]
    assert rows == [(name, line_of(name).rstrip(".")) for name in order]


def test_the_tests_mirror_the_packages() -> None:
    folders = {p.name for p in (ROOT / "tests").iterdir() if p.is_dir()} - {"__pycache__"}
    of_no_package = {"benchmarks", "golden", "gpu", "helpers", "multi_process", "repository", "top"}
    assert folders == FOLDERS.keys() | of_no_package


def test_imports_point_one_way() -> None:
    assert wrong_arrows(IMPORTS) == []


def test_an_arrow_the_wrong_way_is_found() -> None:
    assert wrong_arrows([an_import("planning.plan", "dist_ckpt.shard_io.block_reader")])
    assert wrong_arrows([an_import("format.geometry", "dist_ckpt.planning.plan")])
    assert wrong_arrows([an_import("errors", "dist_ckpt.format.geometry")])
    assert not wrong_arrows([an_import("shard_io.block_reader", "dist_ckpt.planning.plan")])
    assert not wrong_arrows([an_import("format.geometry", "dist_ckpt.errors")])


def test_of_the_front_door_others_take_only_the_version() -> None:
    users = {i.importer for i in IMPORTS if i.module == PACKAGE} - {*FRONT_DOORS}
    taken = {
        alias.name
        for user in users
        for node in ast.walk(ast.parse(SOURCES[user]))
        if isinstance(node, ast.ImportFrom) and node.module == PACKAGE
        for alias in node.names
        if f"{PACKAGE}.{alias.name}" not in SOURCES
    }
    assert taken == {"__version__"}
    whole = [
        f"{name}: {alias.name}"
        for name, text in SOURCES.items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Import)
        for alias in node.names
        if is_ours(alias.name) and name not in FRONT_DOORS
    ]
    assert whole == []  # it binds the front door as well


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    graph = {m: {o for o in others if is_ours(o)} for m, others in top_level_graph(IMPORTS).items()}
    assert cycle_in(graph) == []
    assert cycle_in({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]


def test_nothing_in_the_package_imports_testing() -> None:
    users = [i for i in IMPORTS if i.module.startswith(f"{PACKAGE}.testing")]
    assert [str(i) for i in users if package_of(i.importer) != "testing"] == []


def is_pure(module: str) -> bool:
    return package_of(module) in PURE or module in PURE_TOO


def test_what_all_stand_on_needs_no_other_third_party() -> None:
    foreign = [
        str(i)
        for i in IMPORTS
        if not is_ours(i.module)
        and package_of(i.importer) in (*PURE, "runtime", "top")
        and i.importer not in WITH_TORCH
        and i.module.split(".")[0] not in sys.stdlib_module_names | THIRD_PARTY_OF_ALL
    ]
    assert foreign == []


def test_pure_modules_do_not_touch_the_world() -> None:
    foreign = [i for i in IMPORTS if is_pure(i.importer) and not is_ours(i.module)]
    assert [str(i) for i in foreign if i.module.split(".")[0] not in COMPUTES] == []
    pure = {name: text for name, text in SOURCES.items() if is_pure(name)}
    of_os = {f"{name}: {found}" for name in pure for found in uses_of_os(pure[name]) - OF_OS}
    assert of_os == set()
    assert {name for name, text in pure.items() if re.search(OPENING, text)} == OPENS_A_FILE


def uses_of_os(source: str) -> set[str]:
    """Return what a module takes of `os`, by attribute or by import."""
    tree = ast.parse(source)
    taken = {f"os.{node.attr}" for node in ast.walk(tree) if is_attribute_of_os(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            taken |= {f"os.{alias.name}" for alias in node.names}
    return taken


def is_attribute_of_os(node: ast.AST) -> TypeGuard[ast.Attribute]:
    return (
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "os"
    )


def test_imports_are_absolute_and_at_the_top() -> None:
    assert [str(i) for i in IMPORTS if i.module.startswith(".")] == []
    assert lazy_imports(IMPORTS) == []


def test_nothing_is_imported_by_a_name_in_a_string_but_by_those_who_say_so() -> None:
    by_name = re.compile(r"\b(import_module|__import__|find_spec|spec_from_\w+)\(")
    users = {name for name, text in SOURCES.items() if by_name.search(text)}
    assert users == {PACKAGE, *TORCH_OR_NUMPY_IF_THERE}


def test_a_lazy_import_is_found_unless_it_says_why() -> None:
    assert lazy_imports([an_import("reader", "torch", "import torch")])
    said = "import torch  # noqa: PLC0415  (only who asks for a tensor pays for it)"
    assert not lazy_imports([an_import("reader", "torch", said)])


def test_torch_and_numpy_are_reached_only_where_tensors_are() -> None:
    graph = top_level_graph(IMPORTS)
    with_torch = {
        name
        for name in SOURCES
        if any(m.split(".")[0] in ("torch", "numpy") for m in reached_from(name, graph))
    }
    bound = [name for name in SOURCES if package_of(name) in WITHOUT_TORCH]
    assert with_torch >= WITH_TORCH
    assert with_torch & {*bound, *WITHOUT_TORCH_TOO} - WITH_TORCH == set()


@pytest.mark.multi_process
def test_importing_what_needs_no_torch_does_not_import_it() -> None:
    bound = [name for name in SOURCES if package_of(name) in WITHOUT_TORCH]
    free = sorted({*bound, *WITHOUT_TORCH_TOO} - WITH_TORCH - {f"{PACKAGE}.__main__"})
    code = f"import sys, {', '.join(free)}; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        timeout=60,
        check=True,
        capture_output=True,
        text=True,
    )
    assert {"torch", "numpy"} & set(done.stdout.split()) == set()
