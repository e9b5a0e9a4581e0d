#!/usr/bin/env bash
# Builds both images and runs them, where no image of another can be had: `python:3.12-slim` is stood in for
# by a root file system made with debootstrap, with Debian's Python.
#
#   docker/try_images.sh [FOLDER, 6 GB, a temporary one by default]
#
# Needs root, and Debian's packages buildah and debootstrap. All it makes is in FOLDER.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=${1:-}
if [ -z "$folder" ]; then
    folder=$(mktemp -d)
    trap 'rm -rf "$folder"' EXIT
fi
mkdir -p "$folder"

# No kernel modules, no daemon: images as plain folders, steps in a chroot.
images() { buildah --storage-driver vfs --root "$folder/images" --runroot "$folder/run" "$@"; }

# What pip is told on this host, such as a mirror, holds in the images' steps as well.
as_here=(--isolation chroot --network host)
mapfile -t told < <(env | sed -n 's/^\(PIP_[A-Z_]*\|[A-Z_]*SSL_CERT[A-Z_]*\)=.*/\1/p')
for name in ${told[@]+"${told[@]}"}; do as_here+=(--env "$name"); done
for path in /etc/pip.conf /etc/ssl/certs ${TRY_IMAGES_BIND:-}; do
    if [ -e "$path" ]; then as_here+=(--volume "$path:$path:ro"); fi
done

step() { printf '\n== %s (%d s)\n' "$*" "$SECONDS"; }

if [ ! -e "$folder/root/usr/local/bin/pip" ]; then
    step "a root file system"
    debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates \
        bookworm "$folder/root" >"$folder/debootstrap.log"
    chroot "$folder/root" python3 -m venv /usr/local
fi
base=$(images from scratch)
images copy --quiet "$base" "$folder/root" / >/dev/null
images config --env PATH=/usr/local/bin:/usr/bin:/bin "$base"
images commit --quiet --rm "$base" docker.io/library/python:3.12-slim >/dev/null

build() {
    step "docker/$1"
    images build --quiet --pull=never "${as_here[@]}" -f "docker/$1" -t "$2" .
}
# run_in IMAGE COMMAND...: what `docker run IMAGE COMMAND` does.
run_in() {
    local container
    container=$(images from --pull=never "$1")
    # A name that every resolver knows: nobody tells this host that of a container.
    images run --isolation chroot --hostname localhost "$container" -- "${@:2}"
    images rm "$container" >/dev/null
}

build slim.Dockerfile dist-ckpt-slim
run_in dist-ckpt-slim dist-ckpt --version
run_in dist-ckpt-slim python -c 'import importlib.util; assert not importlib.util.find_spec("torch")'

build Dockerfile dist-ckpt
step "the quick start in it"
run_in dist-ckpt scripts/quickstart.sh
step "done"
