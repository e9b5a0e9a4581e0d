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

# All tests, at once: those that start processes, one after the other; those that mostly wait, in
# two; and the others, which keep one core busy. With more that work at once a background writer,
# whose priority is the lowest, might be taken for dead.
logs=$(mktemp -d)
ids=()
trap 'kill "${ids[@]}" 2>/dev/null || true; rm -rf "$logs"' EXIT
for what in "not multi_process and not waits" "multi_process and waits" "not multi_process and waits"; do
    "$bin/python" -m pytest -m "$what" >"$logs/${#ids[@]}" 2>&1 &
    ids+=($!)
done
code=0
"$bin/python" -m pytest -m "multi_process and not waits" || code=$?
for id in "${ids[@]}"; do
    wait "$id" || code=$?
done
cat "$logs"/*
exit "$code"
