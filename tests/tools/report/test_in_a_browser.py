"""The pages in a real browser: drawn, silent, and asking nobody for anything."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import dist_ckpt as dc
from browser import NAMES, Browser, a_browser, find_browser
from dist_ckpt.tools.report.write_report import write_report

pytestmark = [pytest.mark.multi_process, pytest.mark.sampled(2)]

HOSTILE = "</script><script>alert(1)</script>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    pytest.importorskip("plotly")
    program = find_browser()
    if program is None:
        pytest.skip(f"no browser is on PATH: {', '.join(NAMES)}")
    with a_browser(program) as browser:
        yield browser


def opened(browser: Browser, page: Path, **how: Any) -> None:
    """Open a page, and check what every page keeps."""
    browser.open(page, **how)
    assert browser.problems() == []
    assert browser.value("document.documentElement.dataset.drawn") == "yes"
    assert browser.requests() == [page.as_uri()]
    assert browser.value("document.documentElement.scrollWidth <= innerWidth")


def num_of(browser: Browser, what: str) -> int:
    found: int = browser.value(f"document.querySelectorAll({what!r}).length")
    return found


@pytest.fixture(scope="module")
def run_of_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("run")
    state = {"model": torch.nn.Linear(8, 8), HOSTILE: {"<b>w</b>": torch.ones(4)}}
    with dc.Checkpointer(root, save=dc.every(steps=1), background=False) as ck:
        for step in ck.steps(state, until=4):
            ck.metrics(step, {"loss": 1.0 / step, f"<i>{HOSTILE}": float("nan")})
    dc.Run(root).pin(2, HOSTILE)
    return root


def test_the_page_of_a_run_is_drawn(browser: Browser, run_of_steps: Path, tmp_path: Path) -> None:
    write_report(run_of_steps, tmp_path / "page.html")
    for how in ({"width": 1280}, {"width": 390}, {"width": 1280, "is_dark": True}):
        opened(browser, tmp_path / "page.html", **how)
        # On a computer no table is wider than the page, so its last column is not cut.
        is_cut = "[...document.querySelectorAll('.wide')].some(e => e.scrollWidth > e.clientWidth)"
        assert how["width"] < 1000 or not browser.value(is_cut)
        assert num_of(browser, "#phases .barlayer .point") >= 12
        assert num_of(browser, "#history .scatterlayer .point") == 4
        assert num_of(browser, ".metric .scatterlayer .point") >= 4
        assert num_of(browser, "#steps .barlayer .point") == 4


@pytest.mark.long
def test_the_page_of_a_checkpoint_is_drawn(
    browser: Browser, run_of_steps: Path, tmp_path: Path
) -> None:
    dc.reshard(f"{run_of_steps}@latest", tmp_path / "cut", world_size=3)
    write_report(tmp_path / "cut", tmp_path / "page.html")
    opened(browser, tmp_path / "page.html")
    assert num_of(browser, "#sizes .treemaplayer path.surface") >= 5
    assert num_of(browser, "#heat .heatmaplayer image") == 1
    assert num_of(browser, "#totals .barlayer .point") == 3
    colours = "[...document.querySelectorAll('#sizes path.surface')].map(p => p.style.fill).join()"
    before = browser.value(colours)
    browser.value("document.querySelector('input[value=dtype]').click()")
    assert num_of(browser, "#sizes-keys li") == 1
    assert browser.value(colours) != before


def test_hostile_names_are_shown_as_they_are_and_nothing_of_them_runs(
    browser: Browser, run_of_steps: Path, tmp_path: Path
) -> None:
    write_report(f"{run_of_steps}@2", tmp_path / "page.html")
    opened(browser, tmp_path / "page.html")
    shown = browser.value("document.querySelector('#sizes').textContent")
    assert HOSTILE in shown
    assert "<b>w</b>" in shown
    assert num_of(browser, "script") == 3
    # What got in all the same would not run: the policy lets only the page's own scripts.
    browser.value(
        "document.body.append(Object.assign(document.createElement('script'), {text: 'ran = 1'}))"
    )
    assert browser.value("typeof ran") == "undefined"


def test_a_page_that_wants_something_from_elsewhere_would_be_seen(
    browser: Browser, tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    page.write_text("<img src='other.png'><script>console.log('told'); nothing()</script>")
    browser.open(page)
    browser.wait_for("true")
    assert browser.requests() == [page.as_uri(), (tmp_path / "other.png").as_uri()]
    assert len(browser.problems()) >= 2
