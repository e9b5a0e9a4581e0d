#!/usr/bin/env bash
# Builds the sdist and the wheel into dist/, and checks each in an empty environment: the library and
# the command without torch, then a save and a load with torch. The release workflow calls this.
# With a tag such as v0.2.0 as argument, the version of the package must be that of the tag.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python3}
root=$PWD
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' dist_ckpt/__init__.py)
if [ $# -gt 0 ] && [ "$1" != "v$version" ]; then
    echo "release: the tag is $1, and the version of the package is $version." >&2
    echo "Set __version__ in dist_ckpt/__init__.py, or push the tag v$version." >&2
    exit 1
fi

"$python" -m venv "$work/build"
"$work/build/bin/pip" install --quiet --disable-pip-version-check "build>=1.2"
rm -rf dist
"$work/build/bin/python" -m build --quiet --outdir dist .

cat >"$work/round_trip.py" <<'EOF'
import sys
import dist_ckpt as dc
import torch

state = {"model": torch.nn.Linear(4, 2), "step": 3}
dc.save(state, sys.argv[1], step=3)
other = {"model": torch.nn.Linear(4, 2), "step": 0}
dc.load(other, sys.argv[1])
assert other["step"] == 3
assert torch.equal(state["model"].weight, other["model"].weight)
assert dc.verify(sys.argv[1]).ok
EOF

for package in "dist/dist_ckpt-$version.tar.gz" "dist/dist_ckpt-$version-py3-none-any.whl"; do
    echo "release: checking $package"
    rm -rf "$work/venv"
    "$python" -m venv "$work/venv"
    # From another folder, so that this clone is not what is imported.
    cd "$work"
    "$work/venv/bin/pip" install --quiet --disable-pip-version-check "$root/$package"
    "$work/venv/bin/dist-ckpt" --version | grep -qF "$version"
    "$work/venv/bin/python" -P -c 'import dist_ckpt, sys; dist_ckpt.open; assert "torch" not in sys.modules'
    "$work/venv/bin/pip" install --quiet --disable-pip-version-check -c "$root/constraints.txt" \
        "$root/${package}[torch,report]"
    rm -rf "$work/ck"
    "$work/venv/bin/python" -P round_trip.py "$work/ck"
    "$work/venv/bin/dist-ckpt" show "$work/ck" >/dev/null
    "$work/venv/bin/dist-ckpt" report "$work/ck" --output "$work/page.html" >/dev/null
    test -s "$work/page.html"
    cd "$root"
done
echo "release: dist_ckpt $version is ready in dist/"
