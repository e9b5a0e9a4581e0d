#!/usr/bin/env bash
# Everything that must hold before a change is taken: lint, types, tests. It sets itself up.
# Arguments go to pytest: scripts/test.sh tests/core/format, in seconds, as what is marked slow is left out
# (scripts/test.sh -m slow tests/core/format runs that). Without arguments everything is run that must
# hold before a merge. tests/README.md has what the two first words mean:
#   --long   also what may be found a day later; with arguments, of these tests
#   --docs   what the documents say alone: pages, their programs, types, launch files, quick start
# With TORCH=2.9.1 the tests alone run, with that version of torch: see scripts/compat.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# What was compiled is kept: tests start hundreds of processes.
unset PYTHONDONTWRITEBYTECODE
scripts/setup_venv.sh

bin=.venv${TORCH:+-torch-"$TORCH"}/bin
if [ -z "${TORCH:-}" ]; then
    scripts/lint.sh
    [ -z "$*" ] || [ "$*" = --long ] || "$bin/mypy"
fi
options=()
documents=(docs from_other_systems launch launch_nodes scripts site tutorial types)
case "${1:-}" in
    --long)
        options=(--long -o timeout=3600)
        shift
        ;;
    --docs)
        shift
        documents=("${documents[@]/#/tests/repository/test_}")
        exec "$bin/python" -m pytest --long "$@" "${documents[@]/%/.py}"
        ;;
esac
case "$*" in
    "") ;;                                                  # all, below
    *::*) exec "$bin/python" -m pytest "${options[@]}" "$@" ;; # these tests, whatever they take
    *)
        [ "${#options[@]}" = 0 ] && options=(-m "not slow")
        exec "$bin/python" -m pytest "${options[@]}" "$@"
        ;;
esac

# All tests, in rows that run at once: see tests/helpers/ranks/rows.py. Threads of torch's that wait by
# turning take the cores from each other.
export OMP_NUM_THREADS=1
if [ -n "${TORCH:-}" ]; then exec "$bin/python" -m pytest --rows "${options[@]}"; fi
# Types are checked beside the tests, which often wait.
types=$(mktemp)
nice "$bin/mypy" >"$types" 2>&1 &
checker=$!
trap 'kill "$checker" 2>/dev/null || true; rm -f "$types"' EXIT
code=0
"$bin/python" -m pytest --rows "${options[@]}" || code=$?
wait "$checker" || code=$?
cat "$types"
exit "$code"
