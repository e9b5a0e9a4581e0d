"""Mutate the documents of a real checkpoint for a while, and check what reading them does.

    .venv/bin/python scripts/fuzz.py --seconds 600 --seed 1
    .venv/bin/python scripts/fuzz.py --of bytes --count 1000000
    .venv/bin/python scripts/fuzz.py --of shrew --count 1000000

The rules are in `tests/helpers/faults/document_fuzz.py`, and for the bytes of a state and `.shrew`
files in `tests/helpers/faults/bytes_fuzz.py`; tests run some hundreds. What breaks one is printed
with its seed, by which `--only SEED` does it again, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import math
import resource
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers" / "makers"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers" / "faults"))

from bytes_fuzz import BytesCorpus, run_bytes, run_shrew
from document_fuzz import Corpus, FindingError, run_one

# Beside what Python and torch have when the first mutant is read.
MEMORY_NBYTES = 1 << 30


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--of", choices=("documents", "bytes", "shrew"), default="documents")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--count", type=int, help="so many, however long they take")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="the seed of one mutant, as it was printed")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        run = runner(args.of, Path(folder))
        if args.only:
            print(run(args.only))
            return 0
        limit_memory()
        if args.count is not None:
            return run_all(run, args.seed, range(args.count), math.inf)
        return run_all(run, args.seed, itertools.count(), args.seconds)


def runner(of: str, folder: Path) -> Callable[[str], str]:
    """Return what reads the mutant of a seed."""
    if of == "documents":
        return partial(run_one, Corpus(folder / "ck"))
    return run_shrew if of == "shrew" else partial(run_bytes, BytesCorpus())


def run_all(run: Callable[[str], str], seed: int, numbers: Iterable[int], seconds: float) -> int:
    outcomes: Counter[str] = Counter()
    findings, start = 0, time.monotonic()
    for number in numbers:
        if time.monotonic() - start >= seconds:
            break
        try:
            outcomes[run(f"{seed}-{number}")] += 1
        except FindingError as error:
            findings += 1
            print(error, flush=True)
    counts = ", ".join(f"{outcome} {count}" for outcome, count in outcomes.most_common())
    total, took_s = sum(outcomes.values()) + findings, time.monotonic() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{total} mutants, {findings} findings: {counts}")
    print(f"{took_s / max(total, 1) * 1e3:.2f} ms each, {peak:.0f} MiB at most")
    return 1 if findings else 0


def limit_memory() -> None:
    """Let this process have so much more memory and no more: a MemoryError is a finding."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MEMORY_NBYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))


if __name__ == "__main__":
    sys.exit(main())
