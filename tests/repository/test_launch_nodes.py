"""The example for several nodes, on two that are namespaces of this host.

A node is a network, a hostname, processes and shared memory of its own; the folder of the
checkpoints is common. Making them takes root.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import dist_ckpt as dc

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "launch" / "torchrun_nodes.sh"
TINY = ("--dim", "32", "--layers", "1", "--heads", "2", "--length", "16", "--batch", "4")
LIMIT_S = 90

pytestmark = [
    pytest.mark.long,
    pytest.mark.multi_process,
    pytest.mark.slow,
    pytest.mark.skipif(
        os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("unshare")),
        reason="makes network namespaces: root, iproute2 and util-linux are needed",
    ),
]

# Within the namespaces of a node: its name, the names of all, and shared memory of its own.
ENTER = """
hostname "$1"
mount --bind "$2" /etc/hosts
mount -t tmpfs tmpfs /dev/shm
exec "${@:3}"
"""


def ip(*arguments: str) -> None:
    """Run the command that makes networks."""
    subprocess.run(["ip", *arguments], check=True, timeout=10)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[tuple[str, str]]:
    """Make two networks with a cable between them; return their names."""
    names = (f"dc-a-{os.getpid()}", f"dc-b-{os.getpid()}")
    made: list[str] = []
    try:
        for name in names:
            ip("netns", "add", name)
            made.append(name)
        ip(
            "link",
            "add",
            "cable",
            "netns",
            names[0],
            "type",
            "veth",
            "peer",
            "cable",
            "netns",
            names[1],
        )
        lines = ["127.0.0.1 localhost"]
        for number, name in enumerate(names, 1):
            ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", "cable")
            ip("-n", name, "link", "set", "cable", "up")
            ip("-n", name, "link", "set", "lo", "up")
            lines.append(f"10.77.0.{number} {name}")
        (tmp_path / "hosts").write_text("\n".join(lines) + "\n")
        yield names
    finally:
        for name in made:
            ip("netns", "delete", name)


Start = Callable[[str], "subprocess.Popen[bytes]"]


@pytest.fixture
def start(nodes: tuple[str, str], tmp_path: Path) -> Iterator[Start]:
    """Return what starts the example on a node, as its user would; what is left is killed."""
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "ignore",
        "OMP_NUM_THREADS": "1",
        "DIST_CKPT_HEARTBEAT_TIMEOUT_S": "5",
        "NODES": "2",
        "HEAD": nodes[0],
        "RANKS": "1",
    }
    command = [str(SCRIPT), str(tmp_path / "run"), *TINY, "--save-every", "5", "--steps", "1000000"]
    started: list[subprocess.Popen[bytes]] = []

    def start(node: str) -> subprocess.Popen[bytes]:
        own = [
            "unshare",
            "--uts",
            "--mount",
            "--ipc",
            "--pid",
            "--fork",
            "--kill-child",
            "--mount-proc",
        ]
        enter = ["bash", "-euc", ENTER, "enter", node, str(tmp_path / "hosts")]
        with (tmp_path / f"{node}.log").open("ab") as log:
            job = subprocess.Popen(
                ["ip", "netns", "exec", node, *own, *enter, *command],
                env=environment,
                stdout=log,
                stderr=log,
            )
        started.append(job)
        return job

    try:
        yield start
    finally:
        for job in started:
            job.kill()
            job.wait()


def script_in(job: subprocess.Popen[bytes]) -> int:
    """Return the process of the script, the only child of what made the namespaces."""
    return int(Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text())


def newest_in(root: Path) -> int:
    """Return the newest step that is committed, 0 if none is."""
    there = dc.checkpoints(root) if root.is_dir() else ()
    return max((one.step or 0 for one in there if one.state == "committed"), default=0)


def wait_until(holds: Callable[[], bool], folder: Path) -> None:
    """Wait for it; say what the nodes said if it does not come."""
    until = time.monotonic() + LIMIT_S
    while not holds():
        if time.monotonic() > until:
            pytest.fail("\n".join(log.read_text()[-4000:] for log in folder.glob("*.log")))
        time.sleep(0.1)


def test_a_node_that_died_comes_back_and_all_stop_at_one_step(
    nodes: tuple[str, str], start: Start, tmp_path: Path
) -> None:
    root = tmp_path / "run"
    first, second = (start(node) for node in nodes)
    wait_until(lambda: newest_in(root) > 0, tmp_path)

    second.kill()  # and with it all that is in its namespaces
    log = tmp_path / f"{nodes[0]}.log"
    wait_until(lambda: "attempt 1 has ended" in log.read_text(), tmp_path)
    left_at = newest_in(root)
    second = start(nodes[1])
    wait_until(lambda: newest_in(root) > left_at, tmp_path)
    assert f"resumes from step {left_at}: " in log.read_text()

    os.kill(script_in(first), signal.SIGTERM)
    os.kill(script_in(second), signal.SIGINT)
    assert (first.wait(LIMIT_S), second.wait(LIMIT_S)) == (0, 0)
    assert f"after step {newest_in(root)}, which is durable" in log.read_text()
