#!/usr/bin/env bash
# What a program can say about the text of the project, in seconds: Python, shell, Kubernetes'
# schemas, Markdown, spelling, prose. Rules: pyproject.toml, scripts/prose_lint.py. The pre-commit
# hooks are the same programs out of the same .venv.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bin=.venv/bin
$bin/ruff check .
$bin/ruff format --check .
$bin/codespell .
$bin/shellcheck .ci/run scripts/*.sh launch/*.sh launch/*.sbatch docker/*.sh
$bin/kubernetes-validate --quiet --strict launch/kubernetes.yaml
$bin/rumdl check --quiet .
$bin/python scripts/prose_lint.py
