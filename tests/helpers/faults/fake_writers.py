"""Writers that do nothing but answer: for tests of what a trainer makes of what they say."""

from __future__ import annotations

import socket
from contextlib import suppress
from subprocess import Popen
from threading import Thread

from dist_ckpt.async_save.snapshots.job_folder import RankFolder
from dist_ckpt.async_save.trainer.writer_handle import BackgroundSave, WriterHandle
from dist_ckpt.async_save.writer.writer_messages import (
    Close,
    Done,
    Hello,
    Link,
    LinkClosedError,
    Pause,
    Paused,
    Serve,
    Serving,
    Write,
    WriterMessage,
)
from dist_ckpt.core.comm.rank_messages import Failure
from dist_ckpt.reports import IoCount, SaveReport

SOON_S = 30.0

A_REPORT = SaveReport(
    path="/ck",
    step=3,
    attempt="a",
    world_size=4,
    nbytes=1,
    num_tensors=2,
    num_files=2,
    seconds={"write": 0.5},
    slowest_rank=3,
    slowest_s=0.5,
    exchanges=IoCount(5, 6),
    collectives=IoCount(),
    nbytes_receipt=7,
    storage_reads=IoCount(1, 2),
    storage_writes=IoCount(3, 4),
)


class FakeWriter:
    """The other end of a writer's link, and a process that does nothing. It keeps what it hears.

    `is_begun`: it has begun every save, so that none can be held.
    """

    def __init__(self) -> None:
        self.heard: list[WriterMessage] = []
        self.is_begun = False
        self.process = Popen(["sleep", "300"])
        self._ours, self._end = socket.socketpair()
        self._link = Link(self._end)
        self._thread = Thread(target=self._answer, daemon=True)
        self._thread.start()

    def start(self, folder: RankFolder, hello: Hello) -> tuple[Link, Popen[bytes]]:
        """See `writer_handle.start_writer`."""
        return Link(self._ours), self.process

    def settle(self, name: str, failure: Failure | None = None) -> None:
        """Say that a save is committed, or why not."""
        self._link.send(Done(name, A_REPORT if failure is None else None, failure))

    def end(self) -> None:
        """End it as a kill does: the process, and with it its end of the link."""
        self.process.kill()
        self.process.wait(SOON_S)
        with suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)
        self._thread.join(SOON_S)
        self._link.close()
        self._ours.close()

    def _answer(self) -> None:
        try:
            while (message := self._link.receive(SOON_S)) is not None:
                self.heard.append(message)
                match message:
                    case Pause(snapshot):
                        self._link.send(Paused(snapshot, is_paused=not self.is_begun))
                    case Serve():
                        self._link.send(Serving("new store", len(self.heard)))
                    case Close():
                        self.process.kill()
        except LinkClosedError:
            pass


def order(
    writer: WriterHandle, name: str, store: tuple[str, int, bytes] = ("", 0, b"")
) -> BackgroundSave:
    """Order a save that nobody stages, into the arena that is free."""
    taken = {one.arena for one in writer.unsettled}
    made = BackgroundSave(name, 1 if 0 in taken else 0)
    writer.submit(made, Write(name, f"/ck/{name}", "/dev/shm/none", made.arena, *store))
    return made
