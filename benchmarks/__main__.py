"""Measure dist_ckpt, other libraries and the hardware, side by side, and print tables.

    .venv/bin/python -m benchmarks                               # everything; takes a while
    .venv/bin/python -m benchmarks --only large small --rounds 3
    .venv/bin/python -m benchmarks --only large:save --contenders DCP
    .venv/bin/python -m benchmarks --draw --chart bench.svg --trend trend.svg  # measures nothing

All take turns within each round, after one round that does not count. Whatever was loaded is
compared bit for bit, outside of the timing; who brings back anything else gets no figure. All
saves are durable: files of those who do not sync are synced for them, in their time.

Each run adds its figures to a history, one line of JSON, unless it is a quick one. Pictures are
drawn from the history: of all that is in it, or of what --only names.

The other libraries are installed with: pip install -c constraints.txt -e '.[bench]'
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import NoReturn

from rich.console import Console

from benchmarks import history
from benchmarks.checkpoints import CONTENDERS
from benchmarks.report import IN_MEMORY, document, file_system_of, machine, show
from benchmarks.scenario import OURS, Absent, Measure, Scenario, Settings

MODULES = (
    "benchmarks.checkpoints",
    "benchmarks.planning",
    "benchmarks.background",
    "benchmarks.boundaries",
    "benchmarks.gpu",
)
QUICK_NBYTES = 16 << 20


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line asks for; return 1 if ours has no figure somewhere."""
    scenarios = {scenario.name: scenario for scenario in _scenarios()}
    parser = _parser()
    args = parser.parse_args(arguments)
    for problem in _problems_with(args, scenarios):
        parser.error(problem)
    if args.list:
        for scenario in scenarios.values():
            print(f"{scenario.name:12} {scenario.what}")
        return 0
    measures = [] if args.draw else _measure(args, scenarios)
    if args.chart or args.trend:
        _draw(args)
    rows = [row for measure in measures for row in measure.rows]
    return int(any(isinstance(row, Absent) and row.contender == OURS for row in rows))


def _problems_with(args: argparse.Namespace, scenarios: Container[str]) -> Iterator[str]:
    """Yield what would otherwise be found out when everything has been measured."""
    named = [name.partition(":")[0] for name in args.only or ()]
    if unknown := [name for name in named if name not in scenarios]:
        yield f"no scenario {', '.join(unknown)}; --list names those that there are"
    if args.history.exists() and not (args.history.is_file() and os.access(args.history, os.W_OK)):
        yield f"{args.history} is no file that this user can write, such as a history is"
    if not args.history.parent.is_dir():
        yield f"there is no folder {args.history.parent} for the history"
    pictures = args.chart or args.trend
    if args.draw and not pictures:
        yield "--draw needs --chart or --trend, or both"
    if args.draw and args.json:
        yield "--draw measures nothing that --json could write"
    if pictures and not args.draw and (args.quick or args.no_history):
        yield "pictures are drawn from the history, and this run would not be in it"
    if pictures and importlib.util.find_spec("matplotlib") is None:
        yield "matplotlib draws, and is missing: pip install -c constraints.txt -e '.[bench]'"


def _measure(args: argparse.Namespace, scenarios: Mapping[str, Scenario]) -> list[Measure]:
    """Run the scenarios, show what they measure, and keep it where the command line says."""
    signal.signal(signal.SIGTERM, _exit)
    # Ranks are forked from a process that has imported numpy, and should have no thread then.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # The width of a log is no terminal's: a table must not lose its notes in it.
    console = Console(width=None if sys.stdout.isatty() else 160)
    parent = args.dir or _usual_folder()
    parent.mkdir(parents=True, exist_ok=True)
    origin = history.origin()
    measures: list[Measure] = []
    with tempfile.TemporaryDirectory(prefix="bench-", dir=parent) as folder:
        settings = _settings(args, Path(folder))
        facts = machine(settings.folder)
        _say_where(console, settings, facts)
        for name, _, action in [name.partition(":") for name in args.only or scenarios]:
            asked = replace(settings, actions=(action,) if action else None)
            for measure in scenarios[name].run(asked):
                show(console, measure)
                measures.append(measure)
    if not measures:
        sys.exit("none of the scenarios has such a measure")
    figures = document(measures, settings, facts)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")
    if not (args.quick or args.no_history):
        history.append(args.history, {**origin, **figures})
    return measures


def _draw(args: argparse.Namespace) -> None:
    from benchmarks import chart  # noqa: PLC0415  (needs matplotlib)

    try:
        runs = history.read(args.history)
        if args.only:
            runs = history.chosen(runs, args.only)
        if args.chart:
            chart.draw_newest(runs, args.chart)
        if args.trend:
            chart.draw_trends(runs, args.trend)
    except history.HistoryError as error:
        sys.exit(str(error))


def _scenarios() -> Iterable[Scenario]:
    for name in MODULES:
        if importlib.util.find_spec(name) is not None:
            yield from importlib.import_module(name).scenarios()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_what_to_measure(parser)
    _add_where_figures_go(parser)
    return parser


def _add_what_to_measure(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what to measure")
    names = ", ".join(contender.name for contender in CONTENDERS)
    group.add_argument("--list", action="store_true", help="name the scenarios and end")
    group.add_argument(
        "--only", nargs="+", metavar="NAME[:MEASURE]", help="scenarios, or one measure of them"
    )
    group.add_argument("--contenders", nargs="*", metavar="NAME", help=f"besides ours, of: {names}")
    group.add_argument("--dir", type=Path, help="write below this folder (default: build/)")
    group.add_argument("--rounds", type=int, help="rounds that count (default: 5)")
    group.add_argument("--size-mb", type=int, help="MiB of the large state (default: 1024)")
    group.add_argument("--tensors", type=int, help="how many small tensors (default: 5000)")
    group.add_argument("--quick", action="store_true", help="tiny, one round: does it work?")
    group.add_argument("--deadline-s", type=float, default=300, help="for any one step")


def _add_where_figures_go(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("where the figures go")
    usual = history.USUAL_PATH
    group.add_argument("--json", type=Path, metavar="FILE", help="write those of this run")
    group.add_argument(
        "--history",
        type=Path,
        metavar="FILE",
        default=usual,
        help=f"add them to this one (default: {usual.parent.name}/{usual.name})",
    )
    group.add_argument("--no-history", action="store_true", help="add them to none")
    group.add_argument("--draw", action="store_true", help="measure nothing, only draw")
    group.add_argument(
        "--chart",
        type=Path,
        metavar="FILE",
        help="draw the newest figures of the history, as .svg or .png: bars beside others'",
    )
    group.add_argument(
        "--trend",
        type=Path,
        metavar="FILE",
        help="draw ours in all runs of the history, as fractions of a limit where there is one",
    )


def _settings(args: argparse.Namespace, folder: Path) -> Settings:
    nbytes = args.size_mb << 20 if args.size_mb else QUICK_NBYTES if args.quick else 1 << 30
    known = {contender.name.lower(): contender.name for contender in CONTENDERS}
    contenders = None
    if args.contenders is not None:
        if unknown := [name for name in args.contenders if name.lower() not in known]:
            sys.exit(f"no contender {', '.join(unknown)}; there are {', '.join(known.values())}")
        contenders = tuple(known[name.lower()] for name in args.contenders)
    return Settings(
        folder=folder,
        rounds=args.rounds or (1 if args.quick else 5),
        nbytes=nbytes,
        num_small=args.tensors or (200 if args.quick else 5000),
        quick=args.quick,
        contenders=contenders,
        deadline_s=args.deadline_s,
    )


def _say_where(console: Console, settings: Settings, facts: dict[str, object]) -> None:
    kind = file_system_of(settings.folder)
    console.print(", ".join(f"{name} {value}" for name, value in facts.items()), highlight=False)
    if kind in IN_MEMORY:
        console.print(f"{kind} is no disk: give --dir a folder on one, or believe no save.")
    free = shutil.disk_usage(settings.folder).free
    if free < 3 * settings.nbytes:
        console.print(f"Only {free / 1e9:.1f} GB are free: this may run out of disk space.")
    console.print()


def _usual_folder() -> Path:
    return Path(__file__).parents[1] / "build"


def _exit(_: int, __: FrameType | None) -> NoReturn:
    sys.exit("stopped")


if __name__ == "__main__":
    sys.exit(main())
