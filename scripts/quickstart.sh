#!/usr/bin/env bash
# The whole of dist_ckpt in under three minutes: trains a small GPT on four ranks that save in the
# background, kills one of them and its writer in the middle of a save, goes on with two from what is
# still in memory, and proves that nothing was lost. It sets itself up.
# The checkpoints go to runs/quickstart, anew each time, or into a new folder that is named; options of
# launch/train_gpt.py may follow it, such as those of a smaller model.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

root=${1:-runs/quickstart}    # the run's checkpoints
options=("${@:2}")            # of the training
proof=$root-proof             # logs, and digests of every tensor made by the training itself
save_every=5
limit_s=400                   # for each of the two trainings; half a minute where nothing else runs

export OMP_NUM_THREADS=1      # four ranks on few cores
export PYTHONWARNINGS=ignore  # of torch about itself
# After this time, a process that says nothing is dead; 20 s without this.
export DIST_CKPT_HEARTBEAT_TIMEOUT_S=${DIST_CKPT_HEARTBEAT_TIMEOUT_S:-5}
job=                          # process id of torchrun while it runs
frozen=                       # process id of the writer that is about to be killed
viewer=

say() { printf '\n\033[1m%s\033[0m\n' "$*"; }
fail() {
    printf '\nquickstart failed: %s\n' "$*" >&2
    printf 'The logs are in %s; the checkpoints in %s.\n' "$proof" "$root" >&2
    exit 1
}

end_processes() {
    if [ -n "$frozen" ]; then kill -KILL "$frozen" 2>/dev/null || true; fi
    if [ -n "$job" ]; then
        kill -TERM "$job" 2>/dev/null || true # torchrun ends its ranks
        wait "$job" 2>/dev/null || true
    fi
    if [ -n "$viewer" ]; then kill "$viewer" 2>/dev/null || true; fi
    job='' frozen='' viewer=''
}
trap end_processes EXIT
trap 'exit 130' INT TERM

# train LOG RANKS ARGUMENTS...: starts a training in the background and shows what rank 0 says.
train() {
    local log=$1 ranks=$2
    shift 2
    : >"$log"
    timeout -k 10 "$limit_s" .venv/bin/torchrun --standalone --nproc-per-node "$ranks" \
        launch/train_gpt.py --root "$root" --save-every "$save_every" --digest-out "$proof" "${options[@]}" "$@" \
        >"$log" 2>&1 &
    job=$!
    tail -n +1 -f --pid="$job" "$log" |
        grep --line-buffered -E '^(rank|step|saved|[0-9.]+ M )|: incarnation [0-9]+ ' | sed -u 's/^/  /' &
    viewer=$!
}

# reason_in LOG: the error messages of the ranks, else the log's end.
reason_in() { grep -E '^(\[rank[0-9]+\]: )?[A-Za-z_.]+(Error|Exception)' "$1" || tail -n 5 "$1"; }
path_of() { printf '%s/step-%08d' "$root" "$1"; }
# is_committed STEP: an attempt that was given up has an index as well, until its files are removed.
is_committed() { grep -qs '"state":"committed"' "$(path_of "$1")"/a*/index.json; }
has_attempt() { compgen -G "$(path_of "$1")/a*" >/dev/null; }
is_running() { kill -0 "$job" 2>/dev/null; }

# wait_for COMMAND...: until it succeeds; the training's own limit is the deadline.
wait_for() {
    until "$@"; do
        is_running || fail "the training ended too early: $(reason_in "$proof/four-ranks.log")"
        sleep 0.01
    done
}

# writer_of RANK: the process that writes what the rank has staged, as its lock file says.
writer_of() {
    .venv/bin/python - "$root" "$1" <<'PYTHON'
import sys

from dist_ckpt.async_save.snapshots.job_folder import JobFolder
from dist_ckpt.async_save.snapshots.job_folder import find_root_id, make_job_name
from dist_ckpt.storage import open_storage

storage, root = open_storage(sys.argv[1])
job = JobFolder.find(make_job_name(root, find_root_id(storage, root)))
print(job.rank(int(sys.argv[2])).owner("writer").pid)
PYTHON
}

# kill_in_save STEP TRAINER WRITER: kills rank 0 and its writer, as if their node had died, while the
# save of STEP is written. False if the save was faster. The writer is frozen first: it is the one that
# commits the save, so the save cannot end between the look and the kill.
kill_in_save() {
    local trainer=$2 writer=$3
    wait_for has_attempt "$1"
    frozen=$writer
    kill -STOP "$writer"
    sleep 0.5
    if is_committed "$1"; then
        kill -CONT "$writer"
        frozen=
        return 1
    fi
    kill -KILL "$trainer" "$writer"
    frozen=
}

# next_save: the step of the first save that has not begun.
next_save() {
    local newest
    newest=$(find "$root" -maxdepth 1 -name 'step-*' | sort | tail -n 1)
    echo $(((10#${newest##*-} / save_every + 1) * save_every))
}

loss_of() { sed -n "s/^step *$2  loss \([0-9.]*\) .*/\1/p" "$1"; }

scripts/setup_venv.sh
if [ $# -eq 0 ]; then rm -rf "$root" "$proof"; fi
mkdir -p "$(dirname "$root")"
mkdir "$root" "$proof"
started=$SECONDS

say "1. Train on 4 ranks: FSDP2 x tensor parallel, 2 x 2; save in the background every $save_every steps"
train "$proof/four-ranks.log" 4 --tp 2 --steps 1000
wait_for is_committed "$save_every"

trainer=$(sed -n "s/^rank 0 is process \([0-9]*\):.*/\1/p" "$proof/four-ranks.log")
writer=$(writer_of 0)
torn=$(next_save)
until kill_in_save "$torn" "$trainer" "$writer"; do torn=$(next_save); done
kill "$viewer" 2>/dev/null || true
viewer=

say "2. Rank 0 and its writer were killed (kill -9) in the middle of the save of step $torn. On disk is now:"
(cd "$(path_of "$torn")" && find . -type f -printf '  %12s bytes  %P\n' | sort -k3)
echo "  No index says \"committed\", so there is no checkpoint of step $torn:"
.venv/bin/dist-ckpt ls "$root"
wait "$job" || true # torchrun ends the ranks that live
job=
newest=$((torn - save_every))
is_committed "$newest" || fail "step $newest is not there"
is_committed "$torn" && fail "step $torn was committed although a rank was killed"

say "3. Go on with 2 ranks, FSDP2 only, from the newest step that is whole, in memory or on disk"
train "$proof/two-ranks.log" 2 --steps $((torn + 1))
wait "$job" || fail "the resumed training failed: $(reason_in "$proof/two-ranks.log")"
job=
wait "$viewer" || true
viewer=

say "4. The proof"
# The digests of what 2 ranks have loaded come first. It is step $torn if all ranks had staged it
# whole before the kill: then it is in memory, and on no disk.
loaded=$(find "$proof" -name 'step-*-on-2-ranks' | sort | head -n 1)
cmp "${loaded/2-ranks/4-ranks}" "$loaded" || fail "what was loaded is not what was saved"
resumed=${loaded##*/step-}
resumed=$((10#${resumed%-on-2-ranks}))
echo "  $(wc -l <"$loaded") tensors (weights and AdamW's moments) of step $resumed have the SHA-256 that they had on 4 ranks."
saved=$(printf '%s/step-%08d-on-4-ranks' "$proof" "$newest")
.venv/bin/python - "$(path_of "$newest")" "$saved" <<'PYTHON' || fail "the files hold something else"
import hashlib
import sys

import dist_ckpt as dc

with dc.open(sys.argv[1]) as checkpoint:
    lines = sorted(
        f"{hashlib.sha256(checkpoint[fqn][...].data).hexdigest()}  {fqn}\n"
        for fqn in checkpoint.tensors
    )
with open(sys.argv[2]) as saved:
    assert lines == saved.readlines()
assert "torch" not in sys.modules
PYTHON
echo "  So has what a process without torch reads from the files of step $newest, put together from their shards."
echo "  The loss goes on where it was:"
echo "    step   4 ranks   2 ranks, resumed"
for ((step = resumed + 1; step <= torn; step++)); do
    four=$(loss_of "$proof/four-ranks.log" "$step")
    two=$(loss_of "$proof/two-ranks.log" "$step")
    printf '    %4d   %7s   %7s\n' "$step" "$four" "$two"
    awk -v a="$four" -v b="$two" 'BEGIN { exit !(a != "" && b != "" && (a - b) ^ 2 < 1e-4) }' ||
        fail "the loss of step $step differs"
done

say "5. What there is to look at: dist-ckpt ls $root"
.venv/bin/dist-ckpt ls "$root"
say "dist-ckpt show $root@latest"
.venv/bin/dist-ckpt show "$root@latest"

say "Done in $((SECONDS - started)) s. Read launch/train_gpt.py next; the checkpoints stay in $root."
