"""A small training that tells in a file of each rank what it does, to be preempted at any time.

torchrun starts it: `preempted_job.py ROOT FOLDER`. Its tensor and its counters follow from the step
alone, so each start can say whether what it has restored is what was saved.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

SAVE_EVERY, EVALUATE_EVERY, NUM_POLLS = 15, 25, 150
STEP_S, POLL_S = 0.02, 0.002
# Nobody waits for longer.
HANG_S = 90
SIZE = 64


def tell(what: str, **facts: object) -> None:
    """Append an event to this rank's file, in one write."""
    place = Path(sys.argv[2], f"rank-{os.environ['RANK']}.jsonl")
    event = {"what": what, "at": time.time(), **facts}
    with place.open("a") as file:
        file.write(json.dumps(event) + "\n")


def started_at(pid: int) -> int:
    """Return when a process was started, 0 if it has ended: a pid may be given again."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] == "Z" else int(fields[19])


def main() -> int:
    """Train until somebody stops it; return the code to exit with."""
    tell("begun", pid=os.getpid(), started_at=started_at(os.getpid()))
    if "JOB_WAITS_AT_START" in os.environ:
        time.sleep(HANG_S)
    import torch  # it takes seconds, in which the job is preempted as well
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    import dist_ckpt as dc

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weights = distribute_tensor(torch.zeros(SIZE, dtype=torch.float64), mesh, [Shard(0)])
    first = torch.arange(SIZE, dtype=torch.float64)
    state = {"model": {"w": weights}, "steps": 0, "history": [0]}

    def is_right(step: int) -> bool:
        expected = distribute_tensor(first * (step * (step + 1) // 2), mesh, [Shard(0)])
        same = torch.equal(weights.to_local(), expected.to_local())
        return same and state["steps"] == step and state["history"] == [step]

    save = dc.every(steps=SAVE_EVERY) | dc.at_end | dc.on_signal("TERM", "USR1")
    with dc.Checkpointer(sys.argv[1], save=save, keep=dc.keep.last(3)) as ck:
        tell("opened")
        restored = ck.restore(state) or 0
        tell("restored", step=restored, is_right=is_right(restored))
        for step in ck.steps(state, until=1_000_000):
            tell("train", step=step)
            ck.poll(step - 1)
            if ck.should_stop:
                break
            weights.add_(distribute_tensor(first * step, mesh, [Shard(0)], src_data_rank=None))
            state |= {"steps": step, "history": [step]}
            dist.all_reduce(torch.ones(1))
            time.sleep(STEP_S)
            if step % EVALUATE_EVERY == 0:
                tell("evaluate", step=step)
                for _ in range(NUM_POLLS):
                    time.sleep(POLL_S)
                    ck.poll(step)
            if step % SAVE_EVERY == 0:
                tell("save", step=step)
        assert ck.stopped is not None
        stopped = ck.stopped
        right = is_right(stopped.step)
        tell("stopped", step=stopped.step, is_durable=stopped.is_durable, is_right=right)
    tell("closed")
    dist.destroy_process_group()
    return stopped.exit_code


if __name__ == "__main__":
    sys.exit(main())
