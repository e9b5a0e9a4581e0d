"""Where torch's store and ours listen is what SECURITY.md says."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest
import torch.distributed as dist

from dist_ckpt.async_save.writer.background_writer import StoreServers
from dist_ckpt.async_save.writer.writer_messages import Serve
from dist_ckpt.core.comm.key_value.key_client import TOKEN_NBYTES
from ranks import free_port, run_ranks
from torch_can import bind_the_store

ROOT = Path(__file__).parents[3]
TOKEN = bytes(TOKEN_NBYTES)

# Both are this host; what listens at one of them alone is not reached at the other.
HERE, ELSEWHERE = "127.0.0.1", "127.0.0.2"


def is_reached(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), 10).close()
    except ConnectionRefusedError:
        return False
    return True


@pytest.fixture(autouse=True)
def two_addresses() -> None:
    """Skip where the system's loopback has one address only."""
    with socket.create_server(("", 0)) as server:
        if not is_reached(ELSEWHERE, server.getsockname()[1]):
            pytest.skip(f"{ELSEWHERE} is not this host")


@pytest.mark.parametrize("use_libuv", [True, False])
def test_torch_s_store_listens_on_all_interfaces_whatever_its_address_is(use_libuv: bool) -> None:
    store = dist.TCPStore(HERE, 0, is_master=True, wait_for_workers=False, use_libuv=use_libuv)
    assert is_reached(HERE, store.port)
    assert is_reached(ELSEWHERE, store.port)


@pytest.mark.parametrize(("towards", "is_everywhere"), [("", False), (HERE, True)])
def test_the_writers_store_leaves_the_host_only_if_the_job_does(
    towards: str, is_everywhere: bool
) -> None:
    stores = StoreServers()
    try:
        port = stores.serve(Serve(TOKEN, towards)).port
        assert is_reached(HERE, port)
        assert is_reached(ELSEWHERE, port) == is_everywhere
    finally:
        stores.close()


def save_over_a_bound_store(rank: int, root: str, port: int, code: str) -> list[bool]:
    import dist_ckpt as dc

    if not bind_the_store():  # as SECURITY.md says
        code = code.replace("is_master=", "use_libuv=False, is_master=")
    names = {"dist": dist, "socket": socket, "address": HERE, "rank": rank, "world_size": 2}
    exec(compile(code.replace("29500", str(port)), "SECURITY.md", "exec"), names)
    dc.save({"rank": dc.PerRank(rank)}, f"{root}/ck")
    assert dc.verify(f"{root}/ck").ok
    reached = [is_reached(host, port) for host in (HERE, ELSEWHERE)]
    dist.barrier()
    dist.destroy_process_group()
    return reached


@pytest.mark.multi_process
def test_a_store_that_is_bound_as_shown_listens_there_alone(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "SECURITY.md").read_text(), flags=re.S)
    (block,) = blocks
    code = re.sub(r"^  ", "", block, flags=re.M).replace('"nccl"', '"gloo"')
    args = (str(tmp_path), free_port(), code)
    assert (
        run_ranks(save_over_a_bound_store, *args, world_size=2, store=None) == [[True, False]] * 2
    )
