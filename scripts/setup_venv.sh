#!/usr/bin/env bash
# Makes .venv in the project folder with everything that the tests and the quick start need, from
# package registries. Does nothing if it is there and complete. Set PYTHON to choose the Python.
# With TORCH=2.9.1 it makes .venv-torch-2.9.1 with that version of torch, for scripts/compat.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

is_new_enough() {
    command -v "$1" >/dev/null && "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
        if is_new_enough "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    echo "setup: dist_ckpt needs Python 3.11 or newer; ${PYTHON:-python3} is: $(${PYTHON:-python3} --version 2>&1 || true)." >&2
    echo "Install one, or name it: PYTHON=/path/to/python3.11 $0" >&2
    return 1
}

# constraints.txt; for another torch with that one, and without what torch itself may want otherwise.
constraints() {
    if [ -z "${TORCH:-}" ]; then
        cat constraints.txt
    else
        grep -vE '^(torch|setuptools)==' constraints.txt
        echo "torch==$TORCH"
    fi
}

python=$(find_python)
venv=.venv${TORCH:+-torch-$TORCH}

# Made anew, it would be emptied where the link leads to: in another project's folder.
if [ -L "$venv" ]; then
    echo "setup: $venv is a link to $(readlink "$venv"), which this would change or empty." >&2
    echo "Remove the link, and run this again: it makes a folder of its own." >&2
    exit 1
fi

# Whatever changes what has to be installed changes this.
wanted=$({ "$python" --version; cat pyproject.toml; constraints; } | cksum)
complete=$(cat "$venv/complete" 2>/dev/null || true)
if [ "$complete" = "$PWD"$'\n'"$wanted" ] && "$venv/bin/python" -c '' 2>/dev/null; then
    exit 0
fi

if ! "$python" -c 'import venv, ensurepip' 2>/dev/null; then
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    echo "setup: $python has no venv module." >&2
    echo "On Debian and Ubuntu: apt-get install python$version-venv; then run this again." >&2
    exit 1
fi

echo "setup: installing into $venv (a few minutes the first time)"
# The programs in it name its folder: one that was moved or copied is made anew.
clear=()
if [ -n "$complete" ] && [ "${complete%%$'\n'*}" != "$PWD" ]; then clear=(--clear); fi
"$python" -m venv ${clear[@]+"${clear[@]}"} "$venv"
constraints >"$venv/constraints.txt"
# Not compiled: Python compiles what is imported, a quarter of it, and keeps that.
if ! "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile \
    -c "$venv/constraints.txt" -e '.[torch,dev,docs]'; then
    echo "setup: pip could not install the packages named in pyproject.toml; its reason is above, and longer by:" >&2
    echo "  $venv/bin/python -m pip install -c $venv/constraints.txt -e '.[torch,dev,docs]'" >&2
    echo "Mend that (network, disk space) and run this again: it goes on where it was." >&2
    exit 1
fi
printf '%s\n' "$PWD" "$wanted" >"$venv/complete"
