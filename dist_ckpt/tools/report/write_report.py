"""Write the report of a checkpoint or a run: its facts, as one page of HTML.

Names in a checkpoint are untrusted text. So templates escape all values, and the data is in an
element that is not a script. The policy of the page allows two scripts, by their digests, and no
fetches.
"""

from __future__ import annotations

import json
import os
import time
from base64 import b64encode
from collections.abc import Callable, Mapping
from hashlib import sha256
from importlib import resources
from typing import Any

from dist_ckpt import __version__
from dist_ckpt.core.commit.new_files import check_new_file, new_file
from dist_ckpt.core.format.strict_json import Json
from dist_ckpt.core.storage import open_storage
from dist_ckpt.errors import NotFoundError
from dist_ckpt.reports import size
from dist_ckpt.runs.listing import RunCheckpoint, checkpoints
from dist_ckpt.runs.selectors import resolve
from dist_ckpt.tools.report.checkpoint_facts import CHECKS, Check, bounded, checkpoint_facts, utc
from dist_ckpt.tools.report.run_facts import ProgressOf, run_facts

__all__ = ["report_facts", "write_report"]


def report_facts(
    path: str | os.PathLike[str],
    *,
    check: Check = "quick",
    progress_of: ProgressOf = lambda _: None,
) -> dict[str, Any]:
    """Return what there is to say of the checkpoint at `path`, or of the run in that folder.

    It is JSON, `about` a "checkpoint" or a "run"; its size is bounded, however much is saved there.
    `check` says how damage is looked for: "none", "quick" or "full", as `dist_ckpt.verify` does.
    A damaged checkpoint is told of, and no error. Raises NotFoundError if nothing is there. One
    process calls it, without torch; nothing is changed, but that a full check of a run's checkpoint
    that finds nothing wrong is put down in the run.
    """
    if check not in CHECKS:
        raise ValueError(f'check={check!r}: give "none", "quick" or "full"')
    place = os.fspath(resolve(path))
    facts = _facts(place, check, progress_of)
    return {"path": place, "made_at": time.time(), "made_by": __version__, **facts}


def _facts(place: str, check: Check, progress_of: ProgressOf) -> dict[str, Json]:
    found = _listed(place)
    if found is None:
        return checkpoint_facts(place, None, check, progress_of("verify"))
    if len(found) == 1 and found[0].path == open_storage(place)[1]:
        return checkpoint_facts(place, found[0], check, progress_of("verify"))
    return run_facts(place, check, progress_of)


def _listed(place: str) -> tuple[RunCheckpoint, ...] | None:
    """Return the checkpoints at a place; None if there are files of another system instead."""
    try:
        found = checkpoints(place)
    except NotFoundError:
        if os.path.isfile(place):
            return None
        raise
    return found or (None if _is_foreign(place) else ())


def _is_foreign(place: str) -> bool:
    names = os.listdir(place)
    return any(name.endswith(".safetensors") for name in names) or ".metadata" in names


def write_report(
    path: str | os.PathLike[str],
    file: str | os.PathLike[str],
    *,
    check: Check = "quick",
    overwrite: bool = False,
    progress_of: ProgressOf = lambda _: None,
) -> dict[str, Any]:
    """Write the page about what `path` holds into `file`; return the facts that it is made of.

    See `report_facts`. The page is one file of some 5 MB that loads nothing from anywhere. On
    return it is durable; until it is whole, what was there stays. A file that is no report of ours
    is replaced only with `overwrite`: ExistsError; a folder or a link never is: ValueError.
    ModuleNotFoundError, with what to install, without the extra `report`.
    """
    # Before what may take hours.
    replaces = check_target(file, overwrite=overwrite)
    libraries()
    facts = report_facts(path, check=check, progress_of=progress_of)
    page = page_of(facts)
    with new_file(file, overwrite=replaces) as target:
        target.write(page)
    return facts


def check_target(file: str | os.PathLike[str], *, overwrite: bool) -> bool:
    """Say whether a page replaces what is at `file`. ValueError for a folder or a link.

    ExistsError for another file without `overwrite`, NotFoundError without a folder for it.
    """
    text = os.fspath(file)
    if os.path.islink(text) or (os.path.exists(text) and not os.path.isfile(text)):
        kind = "link" if os.path.islink(text) else "folder" if os.path.isdir(text) else "device"
        raise ValueError(f"{text} is a {kind}: give the name of a file, such as report.html")
    replaces = overwrite or _is_ours(text)
    check_new_file(text, overwrite=replaces)
    return replaces


def _is_ours(file: str) -> bool:
    try:
        with open(file, "rb") as there:
            return there.read(len(START)) == START
    except FileNotFoundError:
        return False


# What a page of ours begins with: `write_report.py` replaces no other file unasked.
MARKER = "made by dist-ckpt report"
START = f"<!doctype html>\n<!-- {MARKER} -->".encode()

NEEDS = 'it needs plotly and jinja2: pip install "dist-ckpt[report]"'


def page_of(facts: Mapping[str, Json]) -> bytes:
    """Return the page. ModuleNotFoundError, with what to install, without plotly or jinja2."""
    jinja2, get_plotlyjs = libraries()
    plotly, charts = _script(get_plotlyjs()), _script(_file("charts.js"))
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_file),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
    )
    environment.filters |= _FILTERS
    text: str = environment.get_template(f"{facts['about']}.html.jinja").render(
        facts=facts,
        json=_data(facts),
        css=_file("page.css"),
        plotly=plotly,
        charts=charts,
        marker=MARKER,
        policy=_policy(plotly, charts),
    )
    return text.encode()


def libraries() -> tuple[Any, Callable[[], str]]:
    """Return jinja2, and what returns plotly.js. ModuleNotFoundError, with what to install."""
    try:
        import jinja2  # noqa: PLC0415  (only who makes a page needs the extra)
        from plotly.offline import get_plotlyjs  # noqa: PLC0415  (only who makes a page needs it)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{error.name} is not installed: {NEEDS}") from error
    return jinja2, get_plotlyjs


def _file(name: str) -> str:
    return resources.files("dist_ckpt.tools.report").joinpath(name).read_text("utf-8")


def _script(text: str) -> str:
    """Return a script as a browser sees it when it takes its digest."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    if "</script" in text.lower() or "<!--" in text:
        raise ValueError("a script that the page is to hold would end in its middle")
    return text


def _data(facts: Mapping[str, Json]) -> str:
    """Return JSON that ends no element: in ASCII, without what HTML gives a meaning."""
    text = json.dumps(facts, separators=(",", ":"), allow_nan=False)
    return text.replace("<", r"\u003c").replace(">", r"\u003e").replace("&", r"\u0026")


def _policy(*scripts: str) -> str:
    digests = (b64encode(sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    # plotly.js sets styles, and puts heat maps in as images.
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


# --- what templates call -------------------------------------------------------------------------


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    if value < 1:
        return f"{value * 1000:.3g} ms"
    return f"{value:.3g} s" if value < 120 else f"{value / 60:.1f} min"


def _number(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _share(nbytes: int, whole: int) -> str:
    return f"{100 * nbytes / whole:.1f}%" if whole else "-"


def _is_grouped(tree: list[Mapping[str, Json]]) -> bool:
    """Say whether a box that holds no other stands for several tensors."""
    opened = {node["parent"] for node in tree}
    return any(node["num_tensors"] != 1 and i not in opened for i, node in enumerate(tree))


def _notes(one: Mapping[str, Json]) -> list[Json]:
    """Return what there is to know of a checkpoint of a run besides, in words."""
    protections, why = one["protected_by"], one["why"]
    assert isinstance(protections, list)
    told = (("orphaned", "is_orphaned"), ("checked in full earlier", "is_verified"))
    replaced = ["being replaced"] if one["is_being_replaced"] else []
    notes = [text for text, is_so in told if one[is_so]]
    tells = why and (one["has_failed"] or one["state"] != "committed")
    return [*notes, *replaced, *protections, *([why] if tells else [])]


def _newest(checkpoints: list[Mapping[str, Json]]) -> Mapping[str, Json] | None:
    alive = [one for one in checkpoints if one["step"] is not None and not one["is_orphaned"]]
    return alive[-1] if alive else None


_FILTERS = {
    "bounded": bounded,
    "clock": lambda at: time.strftime("%H:%M:%S UTC", time.gmtime(at)),
    "counted": _counted,
    "day": lambda at: time.strftime("%Y-%m-%d", time.gmtime(at)),
    "is_grouped": _is_grouped,
    "last_part": lambda path: path.rstrip("/").rpartition("/")[2] or path,
    "mesh": lambda mesh: " x ".join(f"{name or 'axis'}={n}" for name, n in mesh),
    "newest": _newest,
    "notes": _notes,
    "num": lambda number: f"{number:,}",
    "number": _number,
    "ratio": lambda ratio: "-" if ratio is None else f"{ratio:.3g} times",
    "seconds": _seconds,
    "shape": lambda shape: " x ".join(map(str, shape)) or "scalar",
    "share": _share,
    "size": size,
    "utc": utc,
}
