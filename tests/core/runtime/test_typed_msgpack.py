"""Messages are decoded by many threads at once, from the first time on."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys, threading
from dist_ckpt.core.runtime.typed_msgpack import Message, decode, encode

sys.setswitchinterval(1e-6)
for _ in range(100):
    class Part(Message, frozen=True):
        number: int

    class Whole(Message, frozen=True):
        parts: tuple[Part, ...]
        named: dict[str, Part]

    data, together = encode(Whole((Part(1),), {"a": Part(2)})), threading.Barrier(4)
    found = []
    def run():
        together.wait()
        found.append(decode(data, Whole))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == 4 * [Whole((Part(1),), {"a": Part(2)})]
"""


def test_threads_that_decode_a_class_for_the_first_time_at_once_do_not_end_the_process() -> None:
    # In a process of its own: what it guards against is a crash, and not an exception.
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], check=False, capture_output=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, b"")
