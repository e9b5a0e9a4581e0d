#!/usr/bin/env bash
# Train, stop, go on with another number of ranks: as a user would write it.
# Needs an environment with `pip install -e '.[torch]'`; scripts/setup_venv.sh makes one in .venv.
#
#   launch/torchrun.sh [ROOT [OPTIONS OF train_gpt.py]]
#
# To stop it: SIGTERM or Ctrl-C to torchrun, which hands it to its ranks (Ctrl-C as SIGINT: name "INT"
# in on_signal as well), or SIGTERM or SIGUSR1 to any rank. All ranks save the same step, in the
# background as always, and exit with code 75. torchrun kills them 30 s after it was told to end (the
# newest versions of it have --shutdown-timeout for more); the job takes 25 of them (--stop-within).
# To start it again: the same command. torchrun itself ends with code 1, whatever its ranks end with,
# so who starts it by a script looks for what has stopped it, or starts it again after any failure, as
# below. With --max-restarts it would start them again at once, which is right after a crash.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PATH="$PWD/.venv/bin:$PATH"
root=${1:-runs/torchrun}
options=("${@:2}")
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # several ranks share this machine's cores

# Four ranks: two shards of the data, and the model cut in two. They save at every tenth step ...
torchrun --standalone --nproc-per-node 4 launch/train_gpt.py \
    --root "$root" --tp 2 --steps 1000000 "${options[@]}" &
job=$!
until dist-ckpt ls "$root" 2>/dev/null | grep -q committed; do
    kill -0 "$job"
    sleep 1
done

# ... and where they are when they are told to stop.
kill -TERM "$job"
wait "$job" || echo "torchrun has ended with code $?"
stopped_at=$(dist-ckpt ls "$root" | awk '/committed/ { step = $2 } END { print step }')

# Two ranks, FSDP2 only, go on from there; should one of them die, they are started again.
for attempt in 1 2 3; do
    torchrun --standalone --nproc-per-node 2 launch/train_gpt.py \
        --root "$root" --steps $((stopped_at + 5)) "${options[@]}" && break
    echo "attempt $attempt has failed"
done

# ... and so does a single process.
python launch/train_gpt.py --root "$root" --steps $((stopped_at + 10)) "${options[@]}"

dist-ckpt ls "$root"
