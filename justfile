# The commands of a developer; `just` lists them. Each calls what can be called without just as well.

[private]
default:
    @{{ just_executable() }} --list

# make .venv with everything that the checks need; does nothing if it is there and complete
setup:
    scripts/setup_venv.sh

# Python, shell, Markdown, spelling: a second
lint: setup
    scripts/lint.sh

# mypy --strict
types: setup
    .venv/bin/mypy

# lint, types, tests; with arguments only these tests: just test tests/core/format -k index
test *args:
    scripts/test.sh {{ args }}

# measure: just bench --list, just bench --only large --rounds 3
bench *args: setup
    .venv/bin/python -m benchmarks {{ args }}

# make the site of docs/ in build/site
docs: setup
    .venv/bin/mkdocs build --strict
