#!/usr/bin/env bash
# Runs the tests with other versions of torch, and prints a table of their results:
# scripts/compat.sh 2.7.1 2.9.1 2.11.0. Each version gets a .venv of its own, which takes some 6 GB
# (torch comes with libraries for CUDA; the tests need no GPU), and its log is compat-VERSION.log.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [ $# = 0 ] || [[ $1 == -* ]]; then
    echo "usage: $0 VERSION..., versions of torch such as 2.9.1" >&2
    exit 2
fi

# How many tests ended like that, in both halves of a run.
count() {
    { grep -E '^=+ .* in [0-9.]+s' "$log" | grep -oE "[0-9]+ $1" || true; } |
        awk '{ n += $1 } END { print n + 0 }'
}

rows=() code=0
for version in "$@"; do
    log=compat-$version.log
    if TORCH=$version scripts/test.sh >"$log" 2>&1; then verdict=yes; else verdict=no code=1; fi
    python=$(.venv-torch-"$version"/bin/python -c 'import platform; print(platform.python_version())' || echo none)
    rows+=("| $version | $python | $(count passed) | $(count skipped) | $(count '(failed|error)') | $verdict |")
    echo "${rows[-1]}"
done

echo
echo "| torch | Python | passed | skipped | failed | all hold |"
echo "| --- | --- | --- | --- | --- | --- |"
printf '%s\n' "${rows[@]}"
exit "$code"
