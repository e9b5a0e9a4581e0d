"""Write the report of a checkpoint or a run as one HTML page.

Names in a checkpoint are untrusted text. So templates escape all values, and the data is in an
element that is not a script. The content policy of the page allows two scripts, by their digests,
and no network access.
"""

from __future__ import annotations

import json
import os
import time
from base64 import b64encode
from collections.abc import Callable, Mapping
from contextlib import suppress
from hashlib import sha256
from importlib import resources
from typing import Any

from dist_ckpt import __version__
from dist_ckpt.core.commit.records.incarnations import utc
from dist_ckpt.core.format.strict_json import Json
from dist_ckpt.core.storage import open_storage
from dist_ckpt.errors import NotFoundError
from dist_ckpt.message_text import format_size
from dist_ckpt.runs.listing import RunCheckpoint, checkpoints
from dist_ckpt.runs.selectors import resolve
from dist_ckpt.tools.new_files import check_new_file, new_file
from dist_ckpt.tools.report.report_content import (
    CHECKS,
    Check,
    ProgressOf,
    checkpoint_facts,
    run_facts,
)
from dist_ckpt.tools.report.report_sizes import clip

__all__ = ["report_facts", "write_report"]


def report_facts(
    path: str | os.PathLike[str],
    *,
    check: Check = "quick",
    progress_of: ProgressOf = lambda _: None,
) -> dict[str, Any]:
    """Return the facts of the checkpoint at `path`, or of the run in that folder.

    The facts are JSON of bounded size. `about` is "checkpoint" or "run". `check` is "none", "quick"
    or "full", as for `dist_ckpt.verify`. Damage is part of the facts, not an error. Raises
    NotFoundError if the path does not exist. One process calls this, without torch. Nothing
    changes, with one exception: the run records that a full check found no damage.
    """
    if check not in CHECKS:
        raise ValueError(f'check={check!r}: give "none", "quick" or "full"')
    resolved = os.fspath(resolve(path))
    infos: tuple[RunCheckpoint, ...] = ()
    try:
        infos = checkpoints(resolved)
        if infos:
            is_run = len(infos) > 1 or infos[0].path != open_storage(resolved)[1]
        else:  # files of another system, or a run without checkpoints
            names = os.listdir(resolved)
            is_run = ".metadata" not in names and not any(n.endswith(".safetensors") for n in names)
    except NotFoundError:
        if not os.path.isfile(resolved):
            raise
        is_run = False  # a file of another system
    if is_run:
        facts = run_facts(resolved, check, progress_of)
    else:
        info = infos[0] if infos else None
        facts = checkpoint_facts(resolved, info, check, progress_of("verify"))
    return {"path": resolved, "made_at": time.time(), "made_by": __version__, **facts}


def write_report(
    path: str | os.PathLike[str],
    file: str | os.PathLike[str],
    *,
    check: Check = "quick",
    overwrite: bool = False,
    progress_of: ProgressOf = lambda _: None,
) -> dict[str, Any]:
    """Write the report of `path` into `file`. Return its facts, as `report_facts` does.

    The page is one file of about 5 MB that loads no other file. On return it is durable. It
    replaces an old report only when it is complete. Raises ExistsError for a file that is not a
    report, unless `overwrite`. Raises ValueError for a folder or a link. Without the extra `report`
    it raises ModuleNotFoundError with the command that installs it.
    """
    # Check these before the checkpoints are verified, which may take hours.
    replaces = check_target(file, overwrite=overwrite)
    import_libraries()
    facts = report_facts(path, check=check, progress_of=progress_of)
    page = render_page(facts)
    with new_file(file, overwrite=replaces) as target:
        target.write(page)
    return facts


def check_target(file: str | os.PathLike[str], *, overwrite: bool) -> bool:
    """Return True if a page may replace `file`.

    Raises ValueError for a folder or a link, ExistsError for a file that is not a report, unless
    `overwrite`, and NotFoundError if its folder does not exist.
    """
    text = os.fspath(file)
    if os.path.islink(text) or (os.path.exists(text) and not os.path.isfile(text)):
        kind = "link" if os.path.islink(text) else "folder" if os.path.isdir(text) else "device"
        raise ValueError(f"{text} is a {kind}: give the name of a file, such as report.html")
    replaces = overwrite
    if not overwrite:
        with suppress(FileNotFoundError), open(text, "rb") as existing:
            replaces = existing.read(len(START)) == START
    check_new_file(text, overwrite=replaces)
    return replaces


# Each page begins with this. Only such a file is replaced without `overwrite`.
MARKER = "made by dist-ckpt report"
START = f"<!doctype html>\n<!-- {MARKER} -->".encode()

INSTALL_HINT = 'a report needs plotly and jinja2: pip install "dist-ckpt[report]"'


def render_page(facts: Mapping[str, Json]) -> bytes:
    """Return the page. ModuleNotFoundError if plotly or jinja2 is not installed."""
    jinja2, get_plotlyjs = import_libraries()
    plotly, charts = _check_script(get_plotlyjs()), _check_script(_read_file("charts.js"))
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_read_file),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
    )
    environment.filters |= _FILTERS
    text: str = environment.get_template(f"{facts['about']}.html.jinja").render(
        facts=facts,
        json=_escape_json(facts),
        css=_read_file("page.css"),
        plotly=plotly,
        charts=charts,
        marker=MARKER,
        policy=_content_policy(plotly, charts),
    )
    return text.encode()


def import_libraries() -> tuple[Any, Callable[[], str]]:
    """Return jinja2, and the function that returns plotly.js.

    Raises ModuleNotFoundError with the command that installs them.
    """
    try:
        import jinja2  # noqa: PLC0415  (only a page needs the extra)
        from plotly.offline import get_plotlyjs  # noqa: PLC0415  (only a page needs the extra)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{error.name} is not installed: {INSTALL_HINT}") from error
    return jinja2, get_plotlyjs


def _read_file(name: str) -> str:
    return resources.files("dist_ckpt.tools.report").joinpath(name).read_text("utf-8")


def _check_script(text: str) -> str:
    """Return a script with the line ends that a browser uses when it computes the digest."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    if "</script" in text.lower() or "<!--" in text:
        raise ValueError("a script of the page has an end tag or a comment in its text")
    return text


def _escape_json(facts: Mapping[str, Json]) -> str:
    """Return JSON that cannot end an HTML element: ASCII without special characters of HTML."""
    text = json.dumps(facts, separators=(",", ":"), allow_nan=False)
    return text.replace("<", r"\u003c").replace(">", r"\u003e").replace("&", r"\u0026")


def _content_policy(*scripts: str) -> str:
    digests = (b64encode(sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    # plotly.js sets styles, and inserts heat maps as images.
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    if value < 1:
        return f"{value * 1000:.3g} ms"
    return f"{value:.3g} s" if value < 120 else f"{value / 60:.1f} min"


def _is_grouped(tree: list[Mapping[str, Json]]) -> bool:
    """Return True if a box without inner boxes has several tensors."""
    parents = {node["parent"] for node in tree}
    return any(node["num_tensors"] != 1 and i not in parents for i, node in enumerate(tree))


_NOTES = {
    "is_orphaned": "orphaned",
    "is_verified": "checked in full earlier",
    "is_being_replaced": "being replaced",
}


def _notes(row: Mapping[str, Any]) -> list[str]:
    """Return the notes about a checkpoint of a run, as texts."""
    notes = [text for flag, text in _NOTES.items() if row[flag]]
    has_problem = row["why"] and (row["has_failed"] or row["state"] != "committed")
    return [*notes, *row["protected_by"], *([row["why"]] if has_problem else [])]


def _newest(checkpoints: list[Mapping[str, Json]]) -> Mapping[str, Json] | None:
    alive = [row for row in checkpoints if row["step"] is not None and not row["is_orphaned"]]
    return alive[-1] if alive else None


_FILTERS = {
    "clip": clip,
    "clock": lambda at: time.strftime("%H:%M:%S UTC", time.gmtime(at)),
    "counted": lambda number, noun: f"{number:,} {noun}{'s' * (number != 1)}",
    "day": lambda at: time.strftime("%Y-%m-%d", time.gmtime(at)),
    "is_grouped": _is_grouped,
    "last_part": lambda path: path.rstrip("/").rpartition("/")[2] or path,
    "mesh": lambda mesh: " x ".join(f"{name or 'axis'}={n}" for name, n in mesh),
    "newest": _newest,
    "notes": _notes,
    "num": lambda number: f"{number:,}",
    "number": lambda value: f"{value:.6g}" if isinstance(value, float) else str(value),
    "ratio": lambda ratio: "-" if ratio is None else f"{ratio:.3g} times",
    "seconds": _seconds,
    "shape": lambda shape: " x ".join(map(str, shape)) or "scalar",
    "share": lambda nbytes, whole: f"{100 * nbytes / whole:.1f}%" if whole else "-",
    "size": format_size,
    "utc": utc,
}
