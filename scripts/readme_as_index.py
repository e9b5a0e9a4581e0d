"""For mkdocs: the README is the first page of the site, and there its links begin in docs/."""

from __future__ import annotations

from pathlib import Path
from typing import Any

README = Path(__file__).parents[1] / "README.md"


def on_page_markdown(markdown: str, *, page: Any, **_: object) -> str:
    """Put the README in the place of index.md; called by mkdocs with each page."""
    if page.file.src_uri != "index.md":
        return markdown
    return README.read_text().replace("](docs/", "](")
