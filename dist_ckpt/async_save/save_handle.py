"""The handle of a background save, which `AsyncSaver.save` returns."""

from __future__ import annotations

from collections.abc import Callable

from dist_ckpt.async_save.trainer.writer_handle import WriteJob, WriterHandle
from dist_ckpt.reports import SaveReport


class SaveHandle:
    """A background save. Threads may share it. Its methods are local: no other rank waits."""

    def __init__(
        self,
        path: str,
        step: int | None,
        writer: WriterHandle | None = None,
        order: WriteJob | None = None,
        report: Callable[[SaveReport], SaveReport] | None = None,
    ) -> None:
        self.path = path
        self.step = step
        self._writer = writer
        self._order = order
        self._report = report

    @property
    def skipped(self) -> bool:
        """True if nothing was saved because two older saves were not written yet."""
        return self._order is None

    @property
    def superseded(self) -> bool:
        """True if a newer save replaced it before it began."""
        return self._order is not None and self._order.is_dropped

    def wait_staged(self, timeout_s: float | None = None) -> None:
        """Wait until the state may change. On the CPU it may when `save` returns.

        TimeoutError after `timeout_s`; the save continues.
        """
        if self._order is not None and not self._order.staged.wait(timeout_s):
            raise TimeoutError(
                f"{self.path}: not staged within {timeout_s:g} s; the save continues, wait again"
            )

    def done(self) -> bool:
        """Return True if it is settled: durable, failed, skipped or superseded."""
        if self._order is None or self._writer is None:
            return True
        if not self._order.is_settled:
            self._writer.look()
        return self._order.is_settled

    def result(self, timeout_s: float | None = None) -> SaveReport | None:
        """Wait until the checkpoint is durable; None if it was skipped or superseded.

        TimeoutError after `timeout_s`; the save continues. Raises the error of a failed save: then
        there is no new checkpoint, and older ones are unchanged. But if this rank's writer died,
        the others may have committed the save just before.
        """
        if (failure := self.exception(timeout_s)) is not None:
            raise failure
        done = None if self._order is None else self._order.done
        if done is None or done.report is None or self._report is None:
            return None
        return self._report(done.report)

    def exception(self, timeout_s: float | None = None) -> Exception | None:
        """Wait as `result` does, but return the error of the save instead of raising it."""
        order = self._order
        if order is None or self._writer is None:
            return None
        if not self._writer.wait_for(lambda: order.is_settled, timeout_s):
            raise TimeoutError(
                f"{self.path}: not durable within {timeout_s:g} s; the save continues, wait again"
            )
        order.is_reported = True
        return order.failure
