"""The lint of prose finds what it is against, and where."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from scripts import prose_lint

EXAMPLES = {
    '"who" as a noun': "Memory is freed. Who waits is woken.",
    '"what" as a noun': "Write the index. What is missing raises.",
    'a leading "Of"': "Read the index. Of tied tensors read each.",
    '"of ours", "its own" as nouns': "A folder that is its own.",
    '"is told", "tells what"': "The rank is told.",
    '"beside"': "A file beside the index.",
    '"otherwise than", "so many", "as well"': "Other ranks fail as well.",
    '"it is so", "it is of use"': "Keep it while it is of use.",
    '"nobody", "whoever"': "A file that nobody reads.",
    '"Say whether", "Return what"': "Say whether a file exists.",
    '"is no <noun>"': "The path is no checkpoint.",
    '"is to be done"': "A file that is to be removed.",
    '"what is there", "is left."': "Remove the files that are there.",
    '"comes to"': "The sum comes to 3.",
    '"goes on"': "The job goes on.",
    '"lies in"': "The file lies in a folder.",
    '"stands in"': "The name stands in the index.",
    '"puts what"': "A rank puts it into memory.",
    "a rank that knows or asks": "The rank knows the plan.",
    prose_lint.LONG: "word " * 26 + "end.",
}


def rules_hit(content: str) -> set[str]:
    return {h.rule for h in prose_lint.hits(prose_lint.Text("docs", Path("a.md"), 1, content))}


@pytest.mark.parametrize("rule", [*prose_lint.RULES, prose_lint.LONG])
def test_each_rule_finds_its_example(rule: str) -> None:
    assert rule in rules_hit(EXAMPLES[rule])


def test_plain_sentences_pass() -> None:
    text = "Return the step, or None. Ranks that wait are notified. Tell me what is missing?"
    assert rules_hit(text) == set()


def test_a_table_and_an_example_in_a_help_are_no_sentences() -> None:
    words = "word " * 26
    assert rules_hit(f"| {words} |\n\n\b\ndist-ckpt {words}") == set()


def test_python_is_split_into_kinds_with_their_lines() -> None:
    source = '''"""Module."""

# A comment
# of two lines.
@click.option("--all", help="An option.")
def command() -> None:
    """Command."""
    raise ValueError(f"{name} is wrong:" " remove it")
'''
    tree = ast.parse(source)
    path = Path("dist_ckpt/cli/commands/ls.py")
    found = [
        *prose_lint.docstrings(path, tree),
        *prose_lint.messages(path, tree),
        *prose_lint.comments(path, source),
    ]
    assert {(text.kind, text.line, text.content.strip()) for text in found} == {
        ("docstrings", 1, "Module."),
        ("help", 7, "Command."),
        ("help", 5, "An option."),
        ("messages", 8, "is wrong: remove it"),
        ("comments", 3, "A comment of two lines."),
    }


def test_blocks_of_code_in_pages_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "docs/a.md"):
        (tmp_path / name).write_text("One line.\n\n```python\nwhat is told beside\n```\n")
    assert [text.content.strip() for text in prose_lint.pages(tmp_path)] == ["One line."] * 4
