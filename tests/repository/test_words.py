"""One idea, one word, that of the field: the glossary and names are true, and no name is stale."""

from __future__ import annotations

import ast
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path

from package_trees import PACKAGE, package_trees

ROOT = Path(__file__).parents[2]
TREES = package_trees()
# The name that an older version's writer has in its command line.
FORMER = "dist_ckpt.writer"
OF_FORMER = ("dist_ckpt/async_save/trainer/writer_handle.py", "tests/")
MODULES = set(TREES) | {module.removesuffix(".__init__") for module in TREES}
# Words of the glossary that the code must have, each in a name.
REQUIRED = re.findall(
    r"\w+",
    """
    state component leaf shard replica mesh placement layout cell region ownership subclass
    placeholder coordinator participant session exchange planner inventory cached index catalog
    block attempt transaction claim commit abandon receipt decision outcome incarnation annotation
    protection lease pin tag intent retention prune selector liveness heartbeat detector barrier
    policy staging writer job arena snapshot seal storage source template shared
    """,
)
# Words for which the field has others: no name in the package has them.
FOREIGN = {
    *("iteration", "worker", "spec", "tile", "duplicate", "task", "blob", "ack", "finalize"),
    *("rollback", "purge", "cursor", "master", "src", "dst", "dest"),
}
# Our own words of before 0.2.0, in names that are defined: a module, a class, a function, a
# parameter, a field. The value is the word to use.
FORMER_WORDS = {
    "told": "gathered, received, text",
    "verdict": "decision, outcome, result",
    "guard": "protection",
    "fate": "outcome",
    "misfit": "mismatch",
    "compound": "subclass",
    "lone": "single process",
    "standin": "placeholder",
}
# These are wrong as words for records of a run only.
FORMER_WORDS_OF_RUNS = {
    "hold": "lease",
    "fact": "annotation",
    "mark": "deletion intent",
    "sign": "liveness",
    "start": "incarnation",
    "keep": "retention policy (a class)",
}
OF_RUNS = ("core.commit", "runs")
SAYS_NOTHING = {"manager", "handler", "helper", "helpers", "util", "utils", "misc"}


def defined_in(module: str) -> set[str]:
    """Return the names that are defined at the top of a module."""
    names: set[str] = set()
    for node in TREES[module].body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def taken_by(module: str) -> set[str]:
    """Return the names that a module imports from others."""
    imports = [node for node in ast.walk(TREES[module]) if isinstance(node, ast.ImportFrom)]
    return {alias.asname or alias.name for node in imports for alias in node.names}


def exists(dotted: str, *, or_taken: bool = False) -> bool:
    """Say whether the package has a module, or defines a name in a module, of this name."""
    place, _, name = dotted.rpartition(".")
    if dotted in MODULES:
        return True
    inside = [module for module in (place, f"{place}.__init__".lstrip(".")) if module in TREES]
    return any(
        name in defined_in(module) or (or_taken and name in taken_by(module)) for module in inside
    )


def named() -> Iterator[tuple[str, str]]:
    """Yield every name that is given: to modules, classes, functions, arguments, variables."""
    for module, tree in TREES.items():
        yield module, module.rpartition(".")[2]
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                yield module, node.name
            elif isinstance(node, ast.arg):
                yield module, node.arg
            elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
                yield module, node.id if isinstance(node, ast.Name) else node.attr


def defined() -> Iterator[tuple[str, str]]:
    """Yield every name that others meet: of modules, classes, functions, parameters, fields."""
    for module, tree in TREES.items():
        yield module, module.removesuffix(".__init__").rpartition(".")[2]
        yield from ((module, name) for name in defined_in(module))
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                yield module, node.name
            elif isinstance(node, ast.arg):
                yield module, node.arg
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                yield module, node.attr
            if isinstance(node, ast.ClassDef):
                fields = [field for field in node.body if isinstance(field, ast.AnnAssign)]
                yield from (
                    (module, field.target.id)
                    for field in fields
                    if isinstance(field.target, ast.Name)
                )


@cache
def words_of(name: str) -> set[str]:
    """Return the words in a name, and the singular of those that end in s."""
    words = {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}
    return words | {word[:-1] for word in words if word.endswith("s")}


def glossary() -> Iterator[tuple[str, list[str]]]:
    """Yield of each row of the glossary its words, and its names in code."""
    text = (ROOT / "docs" / "glossary.md").read_text()
    for row in re.findall(r"^\| (?!Word|---)(.*) \|$", text, flags=re.M):
        word, _, code = (cell.strip() for cell in f"{row} ".split(" | "))
        yield word, re.findall(r"`([\w.]+)`", code)


def files() -> list[str]:
    """Return the files of the repository, as git knows them; without git, all but what is made."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    try:
        done = subprocess.run(
            command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=60
        )
    except (OSError, subprocess.CalledProcessError):
        made = re.compile(r"\.venv|build|dist|runs|.*cache.*|.*\.egg-info|\.hypothesis")
        paths = [path.relative_to(ROOT) for path in ROOT.rglob("*")]
        return [str(path) for path in paths if not any(map(made.fullmatch, path.parts))]
    return done.stdout.splitlines()


def texts() -> Iterator[tuple[str, str]]:
    """Yield every text of the repository in which a place may be named, but the history."""
    for name in files():
        path = ROOT / name
        is_text = path.suffix in {".md", ".py", ".sh", ".toml", ".yaml", ".yml", ".sbatch", ""}
        is_text = is_text and "golden" not in path.parts
        is_history = name.startswith(("CHANGELOG", "changes/", ".git-blame"))
        if is_text and path.is_file() and not is_history:
            yield name, path.read_text()


def test_the_glossary_names_what_is_in_the_code() -> None:
    rows = list(glossary())
    assert len(rows) > 35
    assert [name for _, names in rows for name in names if not exists(name)] == []


def has_word(word: str, name: str) -> bool:
    """Return True if some word of a name is one of a row, or its verb: select, selector."""
    pairs = product(words_of(word), words_of(name.rpartition(".")[2]))
    return any(min(len(a), len(b)) > 2 and (a.startswith(b) or b.startswith(a)) for a, b in pairs)


def test_what_the_glossary_names_has_the_word_in_its_name() -> None:
    """A row for `lease` that names a class `Hold` is wrong, also if the class exists."""
    wrong = [
        f"{word}: {name}"
        for word, names in glossary()
        for name in names
        if not has_word(word, name)
    ]
    assert wrong == []


def test_words_of_the_field_are_in_the_glossary_and_in_names() -> None:
    words = {part for word, _ in glossary() for part in words_of(word)}
    names = {part for _, names in glossary() for name in names for part in words_of(name)}
    assert [word for word in REQUIRED if word not in words | names] == []
    used = {part for _, name in defined() for part in words_of(name)}
    assert [word for word in REQUIRED if word not in used] == []


def test_words_that_the_field_does_not_use_are_in_no_name() -> None:
    used = [f"{module}: {name}" for module, name in named() if words_of(name) & FOREIGN]
    assert used == []


def test_our_former_words_are_in_no_name() -> None:
    """Messages and plain sentences may have them: `pytest.mark`, "start and stop"."""
    wrong = set()
    for module, name in defined():
        former = dict(FORMER_WORDS)
        if f"{module}.".startswith(tuple(f"{package}." for package in OF_RUNS)):
            former |= FORMER_WORDS_OF_RUNS
        words = words_of(name) | {name.lower().strip("_").replace("_", "")}
        for word in words & former.keys():
            is_verb = word == "keep" and not name[:1].isupper()  # `keep=`, `dc.keep`
            if not is_verb:
                wrong.add(f"{module}: {name}: say {former[word]}")
    assert wrong == set()


def test_no_name_says_nothing() -> None:
    assert [f"{m}: {name}" for m, name in named() if words_of(name) & SAYS_NOTHING] == []


def test_no_two_classes_have_one_name() -> None:
    places = defaultdict(list)
    for module, tree in TREES.items():
        if module.startswith("testing."):  # public: whoever uses it sees nothing of the others
            continue
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                places[node.name.lstrip("_")].append(module)
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                name = node.targets[0].id
                if re.fullmatch(r"_?[A-Z]\w*[a-z]\w*", name):  # a name for a type
                    places[name.lstrip("_")].append(module)
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_every_dotted_name_of_the_package_is_one() -> None:
    stale = [
        f"{name}: {found}"
        for name, text in texts()
        for found in re.findall(r"(?<![\w./-])dist_ckpt(?:\.[A-Za-z_]\w*)+", text)
        if not (found == FORMER and name.startswith(OF_FORMER))
        and not exists(known_part(found.partition(".")[2]), or_taken=True)
    ]
    assert stale == []


def known_part(dotted: str) -> str:
    """Cut off what follows a name in a module: a method, a field, an attribute of a value."""
    parts = dotted.split(".")
    for number in range(len(parts), 0, -1):
        if ".".join(parts[:number]) in MODULES:
            return ".".join(parts[: number + 1])
    return parts[0]


def test_every_file_in_backquotes_is_there() -> None:
    stale = []
    for name, text in texts():
        beside = (ROOT / name).parent
        for found in set(re.findall(r"`([\w/.-]+\.(?:py|md|sh|toml|yaml|svg|jsonl))`", text)):
            if not any(
                (place / found).exists() for place in (ROOT, PACKAGE, PACKAGE / "core", beside)
            ):
                stale.append(f"{name}: {found}")
    assert stale == []
