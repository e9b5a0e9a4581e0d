#!/usr/bin/env bash
# Everything that must hold before a change is taken: lint, types, tests. It sets itself up.
# Arguments go to pytest: scripts/test.sh tests/format, in seconds, as what is marked slow is left out
# (scripts/test.sh -m slow tests/format runs that). Without arguments everything is run.
# With TORCH=2.9.1 the tests alone run, with that version of torch: see scripts/compat.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup_venv.sh

bin=.venv${TORCH:+-torch-"$TORCH"}/bin
if [ -z "${TORCH:-}" ]; then
    scripts/lint.sh
    "$bin/mypy"
fi
case "$*" in
    "") ;;                                                  # all, below
    *::*) exec "$bin/python" -m pytest "$@" ;;                # these tests, whatever they take
    *) exec "$bin/python" -m pytest -m "not slow" "$@" ;;
esac

# All tests, in half the time: those that start processes, one after the other, and beside them the
# others, which keep one core busy. With more at once a background writer, whose priority is the
# lowest, might be taken for dead.
first="multi_process and not waits"
log=$(mktemp)
"$bin/python" -m pytest -m "not ($first)" >"$log" 2>&1 &
others=$!
trap 'kill "$others" 2>/dev/null || true; rm -f "$log"' EXIT
code=0
"$bin/python" -m pytest -m "$first" || code=$?
wait "$others" || code=$?
cat "$log"
exit "$code"
