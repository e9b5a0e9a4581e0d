"""What CONTRIBUTING.md tells a developer is there: recipes, fragments, pages, the API reference."""

from __future__ import annotations

import ast
import re
import tomllib
from importlib.metadata import distributions
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

import dist_ckpt
import dist_ckpt.interop.hf
import dist_ckpt.interop.imports
import dist_ckpt.interop.shrew
import dist_ckpt.storage
from docs_blocks import pages_in_order

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
API = (ROOT / "docs" / "api.md").read_text()
# What is in changes/ besides fragments.
OF_CHANGES_ITSELF = {"README.md", "template.md.jinja"}


def kinds_of_change() -> set[str]:
    return {kind["directory"] for kind in PYPROJECT["tool"]["towncrier"]["type"]}


def is_fragment(name: str) -> bool:
    found = re.fullmatch(r"[a-z0-9]+(?:-[a-z0-9]+)*\.([a-z]+)\.md", name)
    return found is not None and found[1] in kinds_of_change()


def documented(module: str) -> set[str]:
    """Return the names of a module that the API reference takes from its docstrings."""
    return set(re.findall(rf"^::: {re.escape(module)}\.(\w+)$", API, flags=re.M))


def pinned() -> set[str]:
    text = (ROOT / "constraints.txt").read_text()
    return {normal(name) for name in re.findall(r"^([\w.-]+)==", text, flags=re.M)}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_the_justfile_has_the_recipes_that_contributing_names() -> None:
    recipes = set(re.findall(r"^(\w+)(?: \*args)?:", (ROOT / "justfile").read_text(), flags=re.M))
    text = (ROOT / "CONTRIBUTING.md").read_text()
    named = set(re.findall(r"`just (\w+)", text))
    assert named == recipes - {"default"}
    assert {"setup", "lint", "types", "test", "bench", "docs"} <= named


def test_what_is_pinned_installs_with_the_oldest_python_that_we_name() -> None:
    oldest = PYPROJECT["project"]["requires-python"].removeprefix(">=") + ".0"
    wants = {one.name: one.metadata["Requires-Python"] for one in distributions()}
    newer = {name: v for name, v in wants.items() if v and oldest not in SpecifierSet(v)}
    assert newer == {}


def test_what_the_recipes_call_is_there() -> None:
    scripts = re.findall(r"^    (scripts/\S+)", (ROOT / "justfile").read_text(), flags=re.M)
    assert scripts
    assert [name for name in scripts if not (ROOT / name).stat().st_mode & 0o100] == []


def test_a_fragment_is_a_slug_and_a_known_kind() -> None:
    names = {path.name for path in (ROOT / "changes").iterdir()}
    assert names >= OF_CHANGES_ITSELF
    assert [name for name in names - OF_CHANGES_ITSELF if not is_fragment(name)] == []


@pytest.mark.parametrize(
    "name", ["faster.improved.md", "faster.md", "Faster.added.md", "faster.added.rst", "12.fixed"]
)
def test_another_name_is_no_fragment(name: str) -> None:
    assert not is_fragment(name)


def test_the_kinds_that_are_explained_are_those_that_towncrier_knows() -> None:
    table = re.findall(r"^\| `(\w+)` \|", (ROOT / "changes" / "README.md").read_text(), flags=re.M)
    assert set(table) == kinds_of_change()


def test_every_page_of_the_docs_is_in_the_menu_of_the_site() -> None:
    docs = ROOT / "docs"
    pages = {path.relative_to(docs).as_posix() for path in docs.rglob("*.md")}
    menu = pages_in_order()
    assert len(menu) == len(set(menu))
    assert set(menu) == pages


def test_no_page_of_the_site_links_out_of_the_docs() -> None:
    docs = ROOT / "docs"
    out = [
        f"{page.name}: {link}"
        for page in docs.rglob("*.md")
        for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text())
        if not (page.parent / link).resolve().is_relative_to(docs)
    ]
    assert out == ["index.md: ../README.md"]  # which the site puts in the place of that page


def test_every_decision_is_in_the_list_of_decisions() -> None:
    folder = ROOT / "docs" / "decisions"
    listed = re.findall(r"^(\d+)\. \[(.*)\]\((.*)\)$", (folder / "README.md").read_text(), re.M)
    headings = {
        (number, title, path.name)
        for path in folder.glob("0*.md")
        for number, title in re.findall(r"\A# (\d+)\. (.*)\n", path.read_text())
    }
    assert set(listed) == headings
    assert len(listed) == len(list(folder.glob("0*.md")))


def test_the_functions_of_the_calls_in_the_architecture_exist() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\| \d+ \| `([\w/]+\.py)` \| (.*?) \|", text, flags=re.M)
    assert len(rows) == 25
    defined = (ast.FunctionDef, ast.ClassDef)
    for file, functions in rows:
        module = ast.parse((ROOT / "dist_ckpt" / file).read_text())
        tops = {node.name: node for node in module.body if isinstance(node, defined)}
        inner = {
            f"{name}.{node.name}"
            for name, top in tops.items()
            for node in top.body
            if isinstance(node, defined)
        }
        named = re.findall(r"`([\w.]+)`", functions)
        assert named, file
        assert set(named) <= {*tops, *inner}, file


def test_the_api_reference_has_every_public_name() -> None:
    assert documented("dist_ckpt") == set(dist_ckpt.__all__)
    assert documented("dist_ckpt.storage") == set(dist_ckpt.storage.__all__)
    assert documented("dist_ckpt.interop.hf") == set(dist_ckpt.interop.hf.__all__)
    assert documented("dist_ckpt.interop.shrew") == set(dist_ckpt.interop.shrew.__all__)
    assert documented("dist_ckpt.interop.imports") == set(dist_ckpt.interop.imports.__all__)


def test_the_api_reference_has_every_module_of_testing() -> None:
    modules = {path.stem for path in (ROOT / "dist_ckpt" / "testing").glob("*.py")} - {"__init__"}
    assert documented("dist_ckpt.testing") == modules


def test_what_the_extras_name_is_pinned() -> None:
    extras = PYPROJECT["project"]["optional-dependencies"]
    names = {normal(re.split(r"[\[<>=]", one)[0]) for some in extras.values() for one in some}
    assert names - pinned() == set()
