"""What holds for all tests: signals as in a terminal, however the tests were started."""

from __future__ import annotations

import signal

_USUAL = {
    signal.SIGINT: signal.default_int_handler,
    **dict.fromkeys(
        (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGUSR1), signal.SIG_DFL
    ),
}


def pytest_configure() -> None:
    """Undo what a shell, `nohup` or a supervisor has ignored or blocked: children inherit it.

    A shell ignores SIGINT for what it runs in the background, so tests of interrupts would wait
    for ever there.
    """
    for number, usual in _USUAL.items():
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, usual)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
