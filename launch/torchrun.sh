#!/usr/bin/env bash
# Train, stop, go on with another number of ranks: as a user would write it.
# Needs an environment with `pip install -e '.[torch]'`; scripts/setup_venv.sh makes one in .venv.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PATH="$PWD/.venv/bin:$PATH"
root=${1:-runs/torchrun}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # several ranks share this machine's cores

# Four ranks: two shards of the data, and the model cut in two.
torchrun --standalone --nproc-per-node 4 launch/train_gpt.py --root "$root" --tp 2 --steps 20

# Two ranks, FSDP2 only, go on from step 20 ...
torchrun --standalone --nproc-per-node 2 launch/train_gpt.py --root "$root" --steps 30

# ... and so does a single process.
python launch/train_gpt.py --root "$root" --steps 40

dist-ckpt ls "$root"
