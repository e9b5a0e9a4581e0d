"""A script: what calls come to where the storage refuses, as JSON by case and call.

It limits processes (forked, for torch is imported once), mounts file systems for itself alone,
and gives up its rights; a case that this machine does not allow says "skipped".
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

import dist_ckpt as dc

NEW_MOUNTS, NEW_USER = 0x20000, 0x10000000
READ_ONLY, REMOUNT, PRIVATE = 1, 32, 1 << 18 | 1 << 14
NOBODY = 65534

libc = ctypes.CDLL(None, use_errno=True)


def listing(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): path.read_bytes().hex() if path.is_file() else ""
        for path in sorted(folder.rglob("*"))
    }


def system(function: Callable[..., int], *arguments: object) -> None:
    if function(*arguments):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def own_mounts() -> None:
    """Let what this process mounts be seen by nobody else."""
    uid, gid = os.getuid(), os.getgid()
    system(libc.unshare, NEW_MOUNTS if uid == 0 else NEW_MOUNTS | NEW_USER)
    if uid:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
        Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
    system(libc.mount, b"none", b"/", None, ctypes.c_ulong(PRIVATE), None)


def mount(folder: Path, flags: int, options: bytes | None) -> None:
    folder.mkdir(exist_ok=True)
    system(libc.mount, b"none", os.fsencode(folder), b"tmpfs", ctypes.c_ulong(flags), options)


def attempt(folder: Path, call: Callable[[dict[str, Any]], object], user: int = 0) -> object:
    """Say what a call came to, and whether anything on disk or in memory is other than before."""
    before = listing(folder)
    state: dict[str, Any] = {"model": {"w": torch.full((64, 1024), 7.0)}, "lr": 7}
    error, message = None, ""
    if user:
        os.setresuid(user, user, 0)
    try:
        call(state)
    except dc.CheckpointError as caught:
        error, message = type(caught).__name__, str(caught)
    finally:
        if user:
            os.setresuid(0, 0, 0)
    return {
        "error": error,
        "message": message,
        "same": listing(folder) == before,
        "untouched": bool((state["model"]["w"] == 7).all()) and state["lr"] == 7,
    }


def small(path: Path) -> None:
    dc.save({"model": {"w": torch.zeros(64, 1024)}, "lr": 1}, path, step=1)


def saves(folder: Path, user: int = 0) -> dict[str, object]:
    return {
        "save": attempt(folder, lambda state: dc.save(state, folder / "new"), user),
        "overwrite": attempt(
            folder, lambda state: dc.save(state, folder / "ck", overwrite=True), user
        ),
    }


def file_limit(folder: Path) -> dict[str, object]:
    small(folder / "ck")
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
    return saves(folder)


def full(folder: Path) -> dict[str, object]:
    """Leave room for a claim, but not for a tensor of 256 KiB."""
    own_mounts()
    mount(folder, 0, b"size=600k")
    small(folder / "ck")
    (folder / "filler").write_bytes(bytes(150 << 10))
    return saves(folder)


def no_space_at_all(folder: Path) -> dict[str, object]:
    own_mounts()
    mount(folder, 0, b"size=600k")
    small(folder / "ck")
    with (folder / "filler").open("wb", buffering=0) as filler, suppress(OSError):
        while filler.write(bytes(4096)):
            pass
    return saves(folder)


def little_room(folder: Path) -> dict[str, object]:
    """Resume a run on a disk with room for three checkpoints, whose last job died while it saved.

    One checkpoint is left there, and another that no rule keeps. The dead save has the rest.
    """
    own_mounts()
    mount(folder, 0, b"size=1200k")
    root, state = folder / "run", {"model": {"w": torch.zeros(64, 1024)}}
    options: dict[str, Any] = {"save": dc.every(steps=1), "background": False, "max_failures": 0}
    with dc.Checkpointer(root, **options) as ck:
        for _ in ck.steps(state, until=2):
            pass
    (data,) = root.glob("step-00000002/a*/model-00000.safetensors")
    dead = root / "step-00000003" / data.parent.name
    dead.mkdir(parents=True)
    with (dead / data.name).open("wb", buffering=0) as filler:
        with suppress(OSError):
            while filler.write(bytes(4096)):
                pass
        filler.truncate(filler.tell() - (100 << 10))  # for records
    with dc.Checkpointer(root, keep=dc.keep.last(1), **options) as ck:
        for _ in ck.steps(state, until=5):
            pass
    return {"steps": [one.step for one in dc.checkpoints(root)], "dead": dead.exists()}


def read_only(folder: Path) -> dict[str, object]:
    own_mounts()
    mount(folder, 0, b"size=1m")
    small(folder / "ck")
    mount(folder, READ_ONLY | REMOUNT, None)
    path = folder / "ck"

    def read(_: object) -> None:
        dc.load({}, path)
        assert dc.open(path).objects == {"lr": 1}
        assert dc.verify(path).ok

    return {
        **saves(folder),
        "delete": attempt(folder, lambda _: dc.delete(path)),
        "reshard": attempt(folder, lambda _: dc.reshard(path, folder / "new", world_size=2)),
        "readers": attempt(folder, read),
    }


def import_all(path: Path) -> None:
    """Do what is then done without rights: the code may lie where another user does not come."""
    small(path)
    dc.save({}, path, overwrite=True)
    dc.load({}, path)
    dc.delete(path)


def permissions(folder: Path) -> dict[str, object]:
    import_all(folder / "first")
    small(folder / "ck")
    (attempted,) = (folder / "ck").iterdir()
    user = NOBODY if os.getuid() == 0 else 0
    if user:
        os.setgroups([])
        folder.parent.chmod(0o755)
    else:
        for path in (attempted, folder / "ck", folder):
            path.chmod(0o555)
    found = saves(folder, user)
    found["delete"] = attempt(folder, lambda _: dc.delete(folder / "ck"), user)
    for name in ("model-00000.safetensors", "index.json", "objects.msgpack"):
        (attempted / name).chmod(0)
        # Its own listing could not read the file.
        found[name] = attempt(Path("/none"), lambda state: dc.load(state, folder / "ck"), user)
        (attempted / name).chmod(0o644)
    for path in (folder, folder / "ck", attempted):
        path.chmod(0o755)
    return found


def run(case: Callable[[Path], dict[str, object]], root: Path) -> object:
    """Run a case in a process of its own."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        with open(writer, "w") as out:
            try:
                folder = root / case.__name__
                folder.mkdir()
                json.dump(case(folder), out)
            except OSError as error:
                json.dump({"skipped": str(error)}, out)
        os._exit(0)
    os.close(writer)
    with open(reader) as answer:
        text = answer.read()
    os.waitpid(pid, 0)
    return json.loads(text or '{"failed": "it died"}')


if __name__ == "__main__":
    os.umask(0o022)
    cases = (file_limit, full, no_space_at_all, little_room, read_only, permissions)
    print(json.dumps({case.__name__: run(case, Path(sys.argv[1])) for case in cases}))
