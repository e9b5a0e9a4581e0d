"""Mutate the documents of a real checkpoint for a while, and check what reading them does.

    .venv/bin/python scripts/fuzz.py --seconds 600 --seed 1

The rules are in `tests/helpers/document_fuzz.py`; a test runs some hundreds. What breaks one is
printed with its seed, by which `--only SEED` does it again, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import resource
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))

from document_fuzz import Corpus, FindingError, run_one

# Beside what Python and torch have when the first mutant is read.
MEMORY_NBYTES = 1 << 30


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="the seed of one mutant, as it was printed")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        corpus = Corpus(Path(folder) / "ck")
        if args.only:
            print(run_one(corpus, args.only))
            return 0
        limit_memory()
        return run_for(corpus, args.seconds, args.seed)


def run_for(corpus: Corpus, seconds: float, seed: int) -> int:
    outcomes: Counter[str] = Counter()
    findings, stop = 0, time.monotonic() + seconds
    for number in itertools.count():
        if time.monotonic() >= stop:
            break
        try:
            outcomes[run_one(corpus, f"{seed}-{number}")] += 1
        except FindingError as error:
            findings += 1
            print(error, flush=True)
    counts = ", ".join(f"{outcome} {count}" for outcome, count in outcomes.most_common())
    print(f"{sum(outcomes.values()) + findings} mutants, {findings} findings: {counts}")
    return 1 if findings else 0


def limit_memory() -> None:
    """Let this process have so much more memory and no more: a MemoryError is a finding."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MEMORY_NBYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))


if __name__ == "__main__":
    sys.exit(main())
