"""Imports point one way, from room to room; the folders say what belongs together."""

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

# A room imports itself and those after it. All may import the top (errors, options, reports), which
# imports itself. A room is a package of `dist_ckpt`, or of `dist_ckpt.core`.
ORDER = (
    "cli",
    "integrations",
    "checkpointer",
    "interop",
    "tools",
    "default_opener",
    "interop.registry",
    "async_save",
    "runs",
    "core.loading",
    "core.saving",
    "core.checkpoint",
    "core.state",
    "core.commit",
    "core.comm",
    "core.shard_io",
    "core.storage",
    "core.planning",
    "core.format",
    "core.runtime",
    "data",
    "top",
)

# Modules that are rooms of their own: what opens a user's path knows runs, other systems and
# snapshots; of other systems it knows the table of their readers, which are imported by name.
# Binding checks a position in the data.
ROOMS_OF_ONE_MODULE = ("default_opener", "interop.registry", "data")

# Imports that point up; none is added.
KNOWN_ARROWS: set[tuple[str, str]] = set()

# What a reader can take in. A level is a folder of `dist_ckpt`, with its modules and folders: about
# nine names, and never more than these. One idea is one module: a module is split where a second
# idea begins, not where it grows long.
MOST_NAMES = 12
MOST_NAMES_AT_THE_TOP = 16
# One file a command, named like the command: it is looked up, not read.
REGISTERS = {"cli.commands"}
MOST_DEPTH = 4
MOST_LINES = 600
# A module for one importer is at least this long: else it is a part of that one. Programs, the
# front door, adapters and readers of one other library, and public modules may be smaller.
LEAST_LINES_FOR_ONE = 130
SMALL_FOR_ONE = {
    "interop.readers.dequantized_state",  # imported only with `dequantize`
    *("__main__", "async_save.writer.__main__", "storage", "testing.faulty_storage"),
    "core.loading.from_bytes",
    *("integrations.mlflow", "integrations.ray_train", "integrations.wandb"),
    "interop.frameworks.read_lightning",
}

# They decide, and touch nothing: whoever calls them hands in values and gets values. So do two
# modules beside them.
PURE = ("core.planning", "core.format")
PURE_TOO = (
    "dist_ckpt.core.state.binding.sources.saved_tree",
    "dist_ckpt.core.state.tree.containers",
)
COMPUTES = {
    *(
        "__future__",
        "base64",
        "binascii",
        "bisect",
        "collections",
        "contextlib",
        "dataclasses",
        "datetime",
        "enum",
    ),
    *("fnmatch", "functools", "heapq", "itertools", "json", "math", "numbers", "operator", "re"),
    *("struct", "types", "typing", "msgpack", "msgspec", "xxhash"),
    *("os", "pathlib", "sys", "tomllib"),  # for paths as values, and `ShardingConfig.from_file`
}
OF_OS = {"os.PathLike", "os.name", "os.fspath"}
OPENING = r"\bopen\(|\.(read|write)_(text|bytes)\("
OPENS_A_FILE = {"dist_ckpt.core.planning.sharding_config"}
THIRD_PARTY_OF_ALL = {"msgpack", "xxhash", "msgspec"}

# Whoever looks at a checkpoint, checks it or writes it in the background needs no torch.
WITHOUT_TORCH = (
    *("cli", "tools.inspect", "tools.rewrite", "tools.report", "runs"),
    *("async_save.writer", "async_save.snapshots"),
    *("core.checkpoint", "core.comm", "core.commit", "core.shard_io.read", "core.shard_io.write"),
    *("core.storage", "core.planning", "core.format", "core.runtime", "top"),
)
WITH_TORCH = {
    "dist_ckpt.core.comm.collectives.gloo",
    "dist_ckpt.core.comm.process_group",
    "dist_ckpt.core.runtime.torch_private",
}
# Of other packages, what starts writers: it runs before a trainer has anything to save.
# Some formats of other systems are read without it.
WITHOUT_TORCH_TOO = (
    "dist_ckpt.async_save.trainer.writer_handle",
    "dist_ckpt.interop.hf.export",
    "dist_ckpt.interop.imports",
    "dist_ckpt.interop.shrew.files",
)

# They look for torch or numpy when somebody asks for what needs it.
TORCH_OR_NUMPY_IF_THERE = {
    "dist_ckpt.core.shard_io.memory.host_array",
    "dist_ckpt.core.state.tensors.plain_torch",
    "dist_ckpt.core.state.wrappers",
}
# Public packages whose names are imported when they are first used.
LAZY_EXPORTS = "dist_ckpt.core.runtime.public_names"
# The readers of other systems' files, imported when their files are there.
READERS = "dist_ckpt.interop.registry"
# The commands, imported when they are called.
COMMANDS = "dist_ckpt.cli"

# The front door imports what is asked of it; nothing else is lazy without saying why.
FRONT_DOORS = (PACKAGE, f"{PACKAGE}.__main__", f"{PACKAGE}.storage")
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


FOLDERS = {
    ".".join(path.parent.relative_to(ROOT / PACKAGE).parts): path
    for path in sorted((ROOT / PACKAGE).rglob("*/__init__.py"))
}
SOURCES = modules_of_package()
IMPORTS = [i for name, source in SOURCES.items() for i in imports_of(name, source, SOURCES)]


def package_of(module: str) -> str:
    """Return the room of a module; the front doors, which import anything, are of the first."""
    if module in FRONT_DOORS:
        return ORDER[0]
    if module.removeprefix(f"{PACKAGE}.") in ROOMS_OF_ONE_MODULE:
        return module.removeprefix(f"{PACKAGE}.")
    parts = module.split(".")[1:]
    if parts[0] not in FOLDERS:
        return "top"
    return ".".join(parts[:2]) if parts[0] == "core" and len(parts) > 1 else parts[0]


def is_in(module: str, rooms: tuple[str, ...]) -> bool:
    """Say whether a module is in one of the rooms, which may lie deeper than those of `ORDER`."""
    inside = module.removeprefix(f"{PACKAGE}.")
    return package_of(module) in rooms or any(f"{inside}.".startswith(f"{r}.") for r in rooms)


def is_ours(module: str) -> bool:
    return module.split(".", maxsplit=1)[0] == PACKAGE


def wrong_arrows(imports: list[Import]) -> dict[tuple[str, str], str]:
    """Return the imports that point from a lower room to a higher one, with their places."""
    return {
        (i.importer.removeprefix(f"{PACKAGE}."), i.module.removeprefix(f"{PACKAGE}.")): (
            f"{i}: {package_of(i.importer)} -> {package_of(i.module)}"
        )
        for i in imports
        if is_ours(i.module)
        and i.module != f"{PACKAGE}.core"
        and "testing" not in (package_of(i.importer), package_of(i.module))
        and ORDER.index(package_of(i.importer))
        > ORDER.index("top" if i.module == PACKAGE else package_of(i.module))
    }


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
    inside = {
        ".".join(path.relative_to(ROOT / PACKAGE).parts)
        for path in (ROOT / PACKAGE).rglob("*")
        if path.is_dir() and path.name != "__pycache__"
    }
    assert inside == FOLDERS.keys()
    rooms = {name for name in FOLDERS if name.count(".") == (1 if name.startswith("core.") else 0)}
    assert rooms - {"core"} == {*ORDER, "testing"} - {"top", *ROOMS_OF_ONE_MODULE}
    assert [name for name in FOLDERS if not line_of(name).endswith(".")] == []


def test_no_level_and_no_module_is_more_than_a_reader_can_take_in() -> None:
    levels: dict[str, set[str]] = {"": set(), **{name: set() for name in FOLDERS}}
    for name in (*SOURCES, *(f"{PACKAGE}.{folder}" for folder in FOLDERS)):
        above, _, leaf = name.removeprefix(PACKAGE).lstrip(".").rpartition(".")
        if leaf and leaf != "__main__":
            levels[above].add(leaf)
    assert len(levels.pop("")) <= MOST_NAMES_AT_THE_TOP
    full = {name for name, names in levels.items() if len(names) > MOST_NAMES}
    assert full == REGISTERS
    assert [name for name in FOLDERS if name.count(".") >= MOST_DEPTH] == []
    long = {name: len(text.splitlines()) for name, text in SOURCES.items()}
    assert {name: lines for name, lines in long.items() if lines > MOST_LINES} == {}


def test_a_small_module_has_several_importers() -> None:
    importers: dict[str, set[str]] = {name: set() for name in SOURCES}
    for i in IMPORTS:
        if i.importer != PACKAGE and i.module in importers:
            importers[i.module].add(i.importer)
    small = {
        name.removeprefix(f"{PACKAGE}.")
        for name, others in importers.items()
        if len(others) < 2 and len(SOURCES[name].splitlines()) < LEAST_LINES_FOR_ONE
        if not name.startswith(tuple(f"{PACKAGE}.{register}." for register in REGISTERS))
    }
    assert small - {PACKAGE, *FOLDERS} == SMALL_FOR_ONE


def test_no_name_on_the_first_level_is_a_public_name_of_the_package() -> None:
    # A package `dist_ckpt.save` would replace the function of that name once it is imported.
    inside = {name.split(".")[1] for name in SOURCES if name != PACKAGE}
    tree = ast.parse(SOURCES[PACKAGE])
    assigned = [n for n in tree.body if isinstance(n, ast.Assign)]
    public = {
        s
        for n in assigned
        if ast.unparse(n.targets[0]) == "__all__"
        for s in ast.literal_eval(n.value)
    }
    assert public
    assert inside & public == set()


def test_the_architecture_lists_every_room_with_its_line() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    rows = dict(re.findall(r"^\| `([\w/]+)/` \| (.*) \|$", text, flags=re.M))
    assert rows == {name.replace(".", "/"): line_of(name).rstrip(".") for name in FOLDERS}


def test_the_tests_mirror_the_rooms() -> None:
    tests = ROOT / "tests"
    folders = {".".join(p.parent.relative_to(tests).parts) for p in tests.rglob("test_*.py")}
    of_no_room = {"benchmarks", "gpu", "multi_process", "repository", "top"}
    assert folders - of_no_room <= FOLDERS.keys()
    assert {*ORDER} - {"top", *ROOMS_OF_ONE_MODULE} - folders == set()


def test_imports_point_one_way() -> None:
    assert set(wrong_arrows(IMPORTS)) == KNOWN_ARROWS


def test_an_arrow_the_wrong_way_is_found() -> None:
    assert wrong_arrows(
        [an_import("core.planning.plan", "dist_ckpt.core.shard_io.read.block_reader")]
    )
    assert wrong_arrows([an_import("core.format.geometry", "dist_ckpt.core.planning.plan")])
    assert wrong_arrows([an_import("errors", "dist_ckpt.core.format.geometry")])
    assert not wrong_arrows(
        [an_import("core.shard_io.read.block_reader", "dist_ckpt.core.planning.plan")]
    )
    assert not wrong_arrows([an_import("core.format.geometry", "dist_ckpt.errors")])


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
        str(i)
        for i in IMPORTS
        if i.text.lstrip().startswith("import ")
        if is_ours(i.module) and i.importer not in FRONT_DOORS
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
        and package_of(i.importer) in (*PURE, "core.runtime", "top")
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
    assert users == {PACKAGE, LAZY_EXPORTS, READERS, COMMANDS, *TORCH_OR_NUMPY_IF_THERE}


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
    bound = [name for name in SOURCES if is_in(name, WITHOUT_TORCH)]
    assert with_torch >= WITH_TORCH
    assert with_torch & {*bound, *WITHOUT_TORCH_TOO} - WITH_TORCH == set()


@pytest.mark.multi_process
def test_importing_what_needs_no_torch_does_not_import_it() -> None:
    bound = [name for name in SOURCES if is_in(name, WITHOUT_TORCH)]
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
