#!/usr/bin/env bash
# Several nodes without a scheduler: the same command on each of them, with a folder that all see.
# Needs an environment with `pip install -e '.[torch]'`; scripts/setup_venv.sh makes one in .venv.
#
#   NODES=2 HEAD=node-0 launch/torchrun_nodes.sh ROOT [OPTIONS OF train_gpt.py]
#
# NODES is how many there are; 1:2 goes on with one when the other is gone for longer than torchrun
# waits. HEAD is the name or address of one of them, where the others ask (port 29500, PORT=...).
# RANKS is the number of ranks on each node, 8 by default.
#
# To stop it: SIGTERM or Ctrl-C to this script on every node. All ranks save the same step, which the
# first of the signals starts, and end. Where only one node gets it, all save and that one is free; the
# others start again at once, and wait for it to come back.
# To start it again: the same command. It goes on from the newest checkpoint, with as many ranks as there
# are now.
# If a rank or a node dies the others are told so by name after 20 s, and end; each node starts its
# ranks again, waits for the others, and goes on from the newest checkpoint.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PATH="$PWD/.venv/bin:$PATH"
nodes=${NODES:?how many nodes, such as 2}
head=${HEAD:?the name or address of the first node}
root=${1:?the folder of the checkpoints, which all nodes see}

is_stopped=
torchrun=
stop() {
    is_stopped=1
    if [ -n "$torchrun" ]; then kill -TERM "$torchrun" 2>/dev/null || true; fi
}
trap stop TERM INT

# One attempt: returns what torchrun ends with, which is 1 whatever its ranks end with. A signal
# interrupts the wait, not the job: that is in a session of its own, where no Ctrl-C reaches it.
train() {
    setsid torchrun --nnodes "$nodes" --nproc-per-node "${RANKS:-8}" --max-restarts 0 \
        --rdzv-id "$(basename "$root")" --rdzv-backend c10d --rdzv-endpoint "$head:${PORT:-29500}" \
        launch/train_gpt.py --root "$root" "${@:2}" &
    torchrun=$!
    if [ -n "$is_stopped" ]; then stop; fi # the signal came before there was one
    while kill -0 "$torchrun" 2>/dev/null; do
        wait "$torchrun" || true
    done
    wait "$torchrun"
}

for attempt in {1..10}; do
    code=0
    train "$@" || code=$?
    if [ -n "$is_stopped" ] || [ "$code" = 0 ]; then exit 0; fi
    echo "attempt $attempt has ended with code $code"
    sleep 5 # until the others have seen it too
done
exit "$code"
