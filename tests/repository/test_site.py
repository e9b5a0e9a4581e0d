"""The site of docs/ is built with every warning an error, its links lead somewhere, and it loads
nothing from elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlsplit

import pytest

from docs_blocks import ROOT, pages_in_order

pytest.importorskip("mkdocs")
pytest.importorskip("material")
pytest.importorskip("mkdocstrings_handlers")

pytestmark = [pytest.mark.multi_process, pytest.mark.long, pytest.mark.timeout(400)]

# Elements that a browser fetches something for by itself, and the attribute that says what.
FETCHES = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src"}
# Of <link>, those by which a browser fetches nothing.
LINKS_ONLY = {"canonical", "prev", "next", "alternate"}


class Page(HTMLParser):
    """What a page of the site names: its anchors, its links, and what a browser fetches for it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if FETCHES.get(tag) in values and values.get("rel") not in LINKS_ONLY:
            self.fetched.append(values[FETCHES[tag]])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"},
        timeout=300,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    # 404.html stands for any place, and so links from the root of a host.
    found = [path for path in site.rglob("*.html") if path.name != "404.html"]
    assert len(found) == len(pages_in_order())
    return {path: Page(path) for path in found}


def dead(page: Page, pages: dict[Path, Page], site: Path) -> Iterator[str]:
    """Yield the links of a page, and what is fetched for it, that lead nowhere inside the site."""
    for link in [*page.links, *page.fetched]:
        if urlsplit(link).scheme:
            continue
        place, anchor = urldefrag(link)
        target = (
            (page.path.parent / unquote(urlsplit(place).path)).resolve() if place else page.path
        )
        if target.is_dir():
            target /= "index.html"
        inside = target.is_relative_to(site.resolve()) and target.is_file()
        if not inside or (
            anchor and target in pages and unquote(anchor) not in pages[target].anchors
        ):
            yield f"{page.path.relative_to(site)}: {link}"


def test_every_link_of_the_site_leads_somewhere(pages: dict[Path, Page], site: Path) -> None:
    assert sum(len(page.links) for page in pages.values()) > 1000
    assert [link for page in pages.values() for link in dead(page, pages, site)] == []


def test_the_site_loads_nothing_from_elsewhere(pages: dict[Path, Page], site: Path) -> None:
    assert all(page.fetched for page in pages.values())
    fetched = {link for page in pages.values() for link in page.fetched}
    assert [link for link in sorted(fetched) if urlsplit(link).netloc] == []
    styles = "".join(path.read_text() for path in site.rglob("*.css"))
    assert "url(http" not in styles
    assert "url(//" not in styles
    # The theme would fetch a program for these from another host.
    assert [path for path in pages if 'class="mermaid"' in path.read_text()] == []


def test_the_reference_has_what_the_docstrings_say(site: Path) -> None:
    text = (site / "api" / "index.html").read_text()
    for name in ("dist_ckpt.Checkpointer", "dist_ckpt.save", "dist_ckpt.load", "dist_ckpt.keep"):
        assert f'id="{name}"' in text
    assert "Collective: every rank calls this." in text
