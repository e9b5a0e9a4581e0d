"""Strangers crowd on the store that the background writers meet in: saves are made all the same."""

from __future__ import annotations

import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import dist_ckpt as dc
from dist_ckpt.async_save.snapshots.job_folder import JobFolder
from dist_ckpt.async_save.trainer.writer_handle import WriterHandle
from ranks import run_ranks

pytestmark = pytest.mark.multi_process

CALM = {
    "DIST_CKPT_HEARTBEAT_TIMEOUT_S": "10",
    "DIST_CKPT_JOIN_TIMEOUT_S": "20",
    "DIST_CKPT_VISIBILITY_TIMEOUT_S": "5",
}

# Opens connections and opens them again where they are closed: silent ones, and some that send a
# greeting byte by byte, but for its end. Says so when the first of each are there.
CROWD = """
import socket, sys, time
address, num = (sys.argv[1], int(sys.argv[2])), int(sys.argv[3])
DRIP = (48).to_bytes(4, "big") + b"dist_ckpt keys 1"
peers, turn = [], 0
while True:
    while len(peers) < num:
        peer = socket.socket()
        peer.setblocking(False)
        peer.connect_ex(address)
        peers.append([peer, 0])
    if not turn:
        print("there", flush=True)
    turn += 1
    staying = []
    for number, (peer, sent) in enumerate(peers):
        try:
            is_open = peer.recv(1) != b""
        except BlockingIOError:
            is_open = True
        except OSError:
            is_open = False
        if is_open and number % 3 == 0 and turn % 20 == 0 and sent < len(DRIP):
            try:
                sent += peer.send(DRIP[sent:sent + 1])
            except OSError:
                is_open = False
        staying.append([peer, sent]) if is_open else peer.close()
    peers = staying
    time.sleep(0.02)
"""


@pytest.fixture
def job() -> Iterator[str]:
    """A job of its own; whatever is left of it is removed."""
    name = f"test-{uuid.uuid4().hex}"
    yield name
    folder = JobFolder(name)
    for one in folder.rank_folders():
        one.remove()
    folder.remove_if_empty()


def save_in_a_crowd(rank: int, root: str, job: str, num_strangers: int) -> Any:
    """Have strangers at the store from the moment at which it listens, before any writer comes."""
    crowd: list[subprocess.Popen[bytes]] = []
    serve = WriterHandle.serve_store

    def serve_crowded(writer: WriterHandle, peer_host: str) -> tuple[str, int, bytes]:
        host, port, token = serve(writer, peer_host)
        command = [sys.executable, "-S", "-c", CROWD, host, str(port), str(num_strangers)]
        crowd.append(subprocess.Popen(command, stdout=subprocess.PIPE))
        assert crowd[-1].stdout is not None
        crowd[-1].stdout.readline()
        return host, port, token

    WriterHandle.serve_store = serve_crowded  # type: ignore[method-assign, assignment]
    try:
        with dc.AsyncSaver(job=job) as saver:
            for step in (1, 2):
                handle = saver.save({"w": dc.PerRank(torch.ones(1000))}, f"{root}/{step}")
                assert handle.result(60) is not None
    finally:
        for process in crowd:
            process.kill()
            process.communicate()
    return len(crowd)


@pytest.mark.parametrize("num_strangers", [400])
def test_background_saves_are_made_among_hundreds_of_strangers(
    num_strangers: int, tmp_path: Path, job: str
):
    found = run_ranks(
        save_in_a_crowd, str(tmp_path), job, num_strangers, world_size=3, environ=CALM
    )
    assert found == [1, 0, 0]
    for step in (1, 2):
        assert dc.verify(f"{tmp_path}/{step}", level="full").ok
