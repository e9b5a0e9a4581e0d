"""A headless browser that a test opens pages in, by its DevTools protocol over two pipes."""

from __future__ import annotations

import base64
import itertools
import json
import os
import selectors
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

# The names that Debian, Ubuntu, Google and others give to it.
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
LIMIT_S = 120.0


def find_browser() -> str | None:
    """Return the program, or None if there is none on PATH."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One page of a browser; what happens on it is in `events`, as the protocol tells it."""

    def __init__(self, inbox: int, outbox: int) -> None:
        self._inbox, self._outbox = inbox, outbox
        self._numbers = itertools.count(1)
        self._received = bytearray()
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        made = self.call("Target.createTarget", url="about:blank")
        attached = self.call("Target.attachToTarget", targetId=made["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Ask for something, and return the answer; events that come before it are kept."""
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._outbox, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + LIMIT_S
        while (got := self._message(until)).get("id") != number:
            self.events.append(got)
        if "error" in got:
            raise AssertionError(f"{method}: {got['error']}")
        result: dict[str, Any] = got["result"]
        return result

    def open(self, file: Path, *, width: int = 1280, is_dark: bool = False) -> None:
        """Open a file, and wait until the page says that it has drawn its charts."""
        self.events.clear()
        self.resize(width)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=file.as_uri())
        self.wait_for("document.readyState === 'complete'")

    def resize(self, width: int) -> None:
        """Give the window a width."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=False,
        )

    def wait_for(self, expression: str) -> None:
        """Wait until an expression of the page's is true."""
        until = time.monotonic() + LIMIT_S
        while not self.value(expression):
            assert time.monotonic() < until, expression
            time.sleep(0.05)

    def value(self, expression: str) -> Any:
        """Return the value of an expression on the page."""
        got = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        return got["result"].get("value")

    def problems(self) -> list[str]:
        """Return what the page has complained of: exceptions, errors, refusals, dialogs."""
        bad = ("Runtime.exceptionThrown", "Log.entryAdded", "Page.javascriptDialogOpening")
        told = [one for one in self.events if one["method"] in (*bad, "Runtime.consoleAPICalled")]
        return [json.dumps(one)[:500] for one in told]

    def requests(self) -> list[str]:
        """Return the addresses that the page has asked for, but for data that is in it."""
        sent = [one for one in self.events if one["method"] == "Network.requestWillBeSent"]
        addresses = [one["params"]["request"]["url"] for one in sent]
        return [url for url in addresses if not url.startswith("data:")]

    def screenshot(self, file: Path) -> None:
        """Write a picture of the whole page."""
        got = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(got["data"]))

    def _message(self, until: float) -> dict[str, Any]:
        while b"\0" not in self._received:
            with selectors.DefaultSelector() as selector:
                selector.register(self._inbox, selectors.EVENT_READ)
                assert selector.select(max(until - time.monotonic(), 0)), "the browser is silent"
            data = os.read(self._inbox, 1 << 16)
            assert data, "the browser has ended"
            self._received += data
        end = self._received.index(b"\0")
        message: dict[str, Any] = json.loads(self._received[:end])
        del self._received[: end + 1]
        return message


@contextmanager
def a_browser(program: str) -> Iterator[Browser]:
    """Start a browser with a profile of its own; it is ended and removed at the end."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile, _pipes() as pipes:
        (their_inbox, outbox), (inbox, their_outbox) = pipes
        arguments = [
            *(program, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run"),
            *("--disable-dev-shm-usage", "--disable-background-networking", "--disable-sync"),
            *(
                "--disable-component-update",
                "--remote-debugging-pipe",
                f"--user-data-dir={profile}",
            ),
        ]
        log = os.path.join(profile, "log")
        actions: list[Any] = [
            (os.POSIX_SPAWN_DUP2, their_inbox, 3),
            (os.POSIX_SPAWN_DUP2, their_outbox, 4),
            (os.POSIX_SPAWN_OPEN, 1, log, os.O_WRONLY | os.O_CREAT, 0o600),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ]
        environment = {**os.environ, "HOME": profile}
        process = os.posix_spawn(program, arguments, environment, file_actions=actions, setpgroup=0)
        try:
            yield Browser(inbox, outbox)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process, signal.SIGKILL)
            os.waitpid(process, 0)


@contextmanager
def _pipes() -> Iterator[list[tuple[int, int]]]:
    """Yield two pipes whose ends are not 3 or 4, which the browser has."""
    import fcntl  # not everywhere

    def high(descriptor: int) -> int:
        moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 10)
        os.close(descriptor)
        return moved

    ends = [tuple(map(high, os.pipe())) for _ in range(2)]
    try:
        yield [(one[0], one[1]) for one in ends]
    finally:
        for one in itertools.chain(*ends):
            os.close(one)
