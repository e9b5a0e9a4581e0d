"""The fenced blocks of the pages of docs/, and what runs each of them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
# Pages whose programs a test of their own runs: the test, which names the page.
RUN_BY = {
    "accelerate.md": "tests/integrations/test_accelerate.py",
    "format.md": "tests/core/format/test_format.py",
    "from-other-systems.md": "tests/repository/test_from_other_systems.py",
    "lightning.md": "tests/integrations/test_lightning.py",
    "ray.md": "tests/integrations/test_ray_train.py",
    "trackers.md": "tests/integrations/test_references.py",
    "transformers.md": "tests/integrations/test_transformers.py",
    "tutorial.md": "tests/repository/test_tutorial.py",
}
NOTED_FENCE = re.compile(
    r"^#+ (?P<title>[^\n]*)$"
    r"|^(?:<!-- (?P<note>[^\n]*) -->\n)?```(?P<language>[^\n]*)\n(?P<code>.*?)^```$",
    flags=re.M | re.S,
)


@dataclass(frozen=True)
class Block:
    """A fenced block: where it stands, and the comment right above it, which says how it is run."""

    page: str
    heading: str
    language: str
    code: str
    note: str

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return on how many ranks it is run, one run after the other."""
        if not self.note.startswith("run on "):
            return ()
        return tuple(int(number) for number in re.findall(r"\d+", self.note))

    @property
    def reason(self) -> str:
        """Return why nothing runs it here: it is said above it, or it fetches packages."""
        if self.note.startswith("not run here: "):
            return self.note.removeprefix("not run here: ")
        lines = self.code.splitlines()
        return "fetches packages" if all(line.startswith("pip install ") for line in lines) else ""

    def __str__(self) -> str:
        return f"{self.page}: {self.heading}"


def blocks_of_page(path: Path) -> list[Block]:
    """Return the fenced blocks of a page of docs/, in order."""
    heading, found = "", []
    page = path.relative_to(DOCS).as_posix()
    for match in NOTED_FENCE.finditer(path.read_text()):
        heading = match["title"] or heading
        if match["code"] is not None:
            language, note = match["language"], match["note"] or ""
            found.append(Block(page, heading, language, match["code"], note))
    return found


def pages_in_order() -> list[str]:
    """Return the pages in the order of the site's menu, in which they are read."""
    menu = (ROOT / "mkdocs.yml").read_text()
    return re.findall(r"^ +- (?:[^:\n]+: )?(\S+\.md)$", menu, flags=re.M)


def all_blocks() -> list[Block]:
    """Return the fenced blocks of all pages of docs/, as a reader comes to them."""
    return [block for page in pages_in_order() for block in blocks_of_page(DOCS / page)]


def code_of(text: str, language: str) -> list[str]:
    """Return what stands in the fences of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.M | re.S)


def write_commands(folder: Path, python: str) -> Path:
    """Make programs `dist-ckpt`, `torchrun` and `python` that run this checkout; return where."""
    folder.mkdir()
    modules = {"dist-ckpt": " -m dist_ckpt", "torchrun": " -m torch.distributed.run", "python": ""}
    for name, words in modules.items():
        program = folder / name
        program.write_text(f'#!/bin/sh\nexec "{python}"{words} "$@"\n')
        program.chmod(0o755)
    return folder


def make_checkout(folder: Path, python: str) -> Path:
    """Make what looks like a checkout with its .venv, of which a program is Python; return it."""
    (folder / "launch").symlink_to(ROOT / "launch")
    (folder / "scripts").mkdir()
    (folder / "scripts" / "quickstart.sh").symlink_to(ROOT / "scripts" / "quickstart.sh")
    setup = folder / "scripts" / "setup_venv.sh"
    setup.write_text(f'#!/bin/sh\nexec "{ROOT}/scripts/setup_venv.sh"\n')
    setup.chmod(0o755)
    (folder / ".venv").mkdir()
    write_commands(folder / ".venv" / "bin", python)
    (folder / ".venv" / "bin" / "activate").touch()
    return folder
