"""Every line of docs/from-other-systems.md is run, in order, below its section's program."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

from dist_ckpt.cli import main

PAGE = (Path(__file__).parents[2] / "docs" / "from-other-systems.md").read_text()
pytestmark = pytest.mark.multi_process  # a saver starts its writer

SECTIONS = re.split(r"^## From ", PAGE, flags=re.M)[1:]


def lines_of(section: str) -> list[str]:
    """Return the code in the right column of a section's table: all of it, but words."""
    rows = re.findall(r"^\|(?! ---| You had).* \| (.*) \|$", section, flags=re.M)
    assert len(rows) == len(re.findall(r"^\|", section, flags=re.M)) - 2
    code = [row for row in rows if row.startswith("`")]
    assert all(re.fullmatch("`[^`]*`", cell) for cell in code)
    return [cell[1:-1].replace(r"\|", "|") for cell in code]


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.split("\n")[0])
def test_each_line_works(section: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (program,) = re.findall(r"^```python\n(.*?)^```$", section, flags=re.M | re.S)
    names: dict[str, Any] = {}
    exec(compile(program, "the program", "exec"), names)
    lines = lines_of(section)
    assert len(lines) > 5
    for line in lines:
        run(line, names)


def run(line: str, names: dict[str, Any]) -> None:
    if line.startswith("dist-ckpt "):
        with pytest.raises(SystemExit) as ended:
            main(line.split()[1:])
        assert not ended.value.code, line
        return
    tree = ast.parse(line)
    if not isinstance(tree.body[-1], ast.Expr):
        exec(compile(tree, line, "exec"), names)
        return
    value = eval(compile(line, line, "eval"), names) if len(tree.body) == 1 else None
    assert value is not False, line
