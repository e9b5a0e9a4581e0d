#!/usr/bin/env bash
# Everything that must hold before a change is taken: lint, types, tests. It sets itself up.
# Arguments go to pytest: scripts/test.sh -k layers. Marks: slow (scripts/test.sh -m slow), gpu.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup_venv.sh

bin=.venv/bin
$bin/ruff check .
$bin/ruff format --check .
$bin/mypy
exec $bin/python -m pytest "$@"
