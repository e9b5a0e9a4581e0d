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

# All tests, at once: most of them wait, for a disk, a silence or each other. Those that start
# processes take turns in two rows, of which one is about the library and one about what lies around
# it. With more that work at once a background writer, whose priority is the lowest, might be taken
# for dead.
logs=$(mktemp -d)
ids=()
trap 'kill "${ids[@]}" 2>/dev/null || true; rm -rf "$logs"' EXIT
#
# A row reads only the files in which its mark stands: to read them all takes ten seconds.
files_with() { grep -rlE --include='test_*.py' "mark\.$1\b" "${@:2}"; }
mapfile -t waiting < <(files_with waits tests)
mapfile -t around < <(files_with multi_process tests/benchmarks tests/repository)
mapfile -t library < <(files_with multi_process --exclude-dir={benchmarks,repository} tests)
beside() {
    "$bin/python" -m pytest "$@" >"$logs/${#ids[@]}" 2>&1 &
    ids+=($!)
}
beside -m "not multi_process and not waits"
beside -m "multi_process and waits" "${waiting[@]}"
beside -m "not multi_process and waits" "${waiting[@]}"
beside -m "multi_process and not waits" "${around[@]}"
code=0
"$bin/python" -m pytest -m "multi_process and not waits" "${library[@]}" || code=$?
for id in "${ids[@]}"; do
    wait "$id" || code=$?
done
cat "$logs"/*
exit "$code"
