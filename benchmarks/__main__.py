"""Measure dist_ckpt, other libraries and the hardware, side by side, and print tables.

    .venv/bin/python -m benchmarks                               # everything; takes a while
    .venv/bin/python -m benchmarks --only large small --rounds 3
    .venv/bin/python -m benchmarks --only large:save --contenders DCP
    .venv/bin/python -m benchmarks --json bench.json --chart bench.svg

All take turns within each round, after one round that does not count. Whatever was loaded is
compared bit for bit, outside of the timing; who brings back anything else gets no figure. All
saves are durable: files of those who do not sync are synced for them, in their time.

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
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import NoReturn

from rich.console import Console

from benchmarks.checkpoints import CONTENDERS
from benchmarks.report import IN_MEMORY, document, file_system_of, machine, show
from benchmarks.scenario import OURS, Absent, Measure, Scenario, Settings

MODULES = (
    "benchmarks.checkpoints",
    "benchmarks.planning",
    "benchmarks.background",
    "benchmarks.gpu",
)
QUICK_NBYTES = 16 << 20


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for; return 1 if ours has no figure somewhere."""
    signal.signal(signal.SIGTERM, _exit)
    # Ranks are forked from a process that has imported numpy, and should have no thread then.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    scenarios = {scenario.name: scenario for scenario in _scenarios()}
    parser = _parser()
    args = parser.parse_args(arguments)
    if args.list:
        for scenario in scenarios.values():
            print(f"{scenario.name:12} {scenario.what}")
        return 0
    chosen = [name.partition(":") for name in args.only or scenarios]
    if unknown := [name for name, _, _ in chosen if name not in scenarios]:
        parser.error(f"no scenario {', '.join(unknown)}; there are {', '.join(scenarios)}")
    # The width of a log is no terminal's: a table must not lose its notes in it.
    console = Console(width=None if sys.stdout.isatty() else 160)
    parent = args.dir or _usual_folder()
    parent.mkdir(parents=True, exist_ok=True)
    measures: list[Measure] = []
    with tempfile.TemporaryDirectory(prefix="bench-", dir=parent) as folder:
        settings = _settings(args, Path(folder))
        facts = machine(settings.folder)
        _say_where(console, settings, facts)
        for name, _, action in chosen:
            asked = replace(settings, actions=(action,) if action else None)
            for measure in scenarios[name].run(asked):
                show(console, measure)
                measures.append(measure)
    if not measures:
        parser.error("none of the scenarios has such a measure")
    if args.json:
        args.json.write_text(json.dumps(document(measures, settings, facts), indent=1) + "\n")
    if args.chart:
        from benchmarks.chart import draw  # noqa: PLC0415  (needs matplotlib)

        draw(measures, args.chart)
    rows = [row for measure in measures for row in measure.rows]
    return int(any(isinstance(row, Absent) and row.contender == OURS for row in rows))


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
    names = ", ".join(contender.name for contender in CONTENDERS)
    parser.add_argument("--list", action="store_true", help="name the scenarios and end")
    parser.add_argument(
        "--only", nargs="+", metavar="NAME[:MEASURE]", help="scenarios, or one measure of them"
    )
    parser.add_argument(
        "--contenders", nargs="*", metavar="NAME", help=f"besides ours, of: {names}"
    )
    parser.add_argument("--dir", type=Path, help="write below this folder (default: build/)")
    parser.add_argument("--rounds", type=int, help="rounds that count (default: 5)")
    parser.add_argument("--size-mb", type=int, help="MiB of the large state (default: 1024)")
    parser.add_argument("--tensors", type=int, help="how many small tensors (default: 5000)")
    parser.add_argument("--quick", action="store_true", help="tiny, one round: does it work?")
    parser.add_argument("--deadline-s", type=float, default=300, help="for any one step")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    parser.add_argument("--chart", type=Path, metavar="FILE", help="draw them, as .svg or .png")
    return parser


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
