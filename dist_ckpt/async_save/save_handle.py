"""What `AsyncSaver.save` returns: a save under way."""

from __future__ import annotations

from collections.abc import Callable

from dist_ckpt.async_save.trainer.writer_handle import WriteJob, WriterHandle
from dist_ckpt.async_save.writer.messages import Done
from dist_ckpt.reports import SaveReport


class SaveHandle:
    """A background save. Threads may share it; only this rank is asked, and nobody else waits."""

    def __init__(
        self,
        path: str,
        step: int | None,
        writer: WriterHandle | None = None,
        order: WriteJob | None = None,
        report: Callable[[Done], SaveReport] | None = None,
    ) -> None:
        self.path = path
        self.step = step
        self._writer = writer
        self._order = order
        self._report = report

    @property
    def skipped(self) -> bool:
        """Whether nothing was saved, as two older saves were not written yet."""
        return self._order is None

    @property
    def superseded(self) -> bool:
        """Whether a newer save has taken its place before it was begun."""
        return self._order is not None and self._order.is_dropped

    def wait_staged(self, timeout_s: float | None = None) -> None:
        """Wait until the state may change. On the CPU it may when `save` returns.

        TimeoutError if that takes longer; the save goes on.
        """
        if self._order is not None and not self._order.staged.wait(timeout_s):
            raise TimeoutError(
                f"{self.path}: not staged within {timeout_s:g} s; the save goes on, wait again"
            )

    def done(self) -> bool:
        """Say whether it is settled: durable, failed, skipped or superseded."""
        if self._order is None or self._writer is None:
            return True
        if not self._order.is_settled:
            self._writer.look()
        return self._order.is_settled

    def result(self, timeout_s: float | None = None) -> SaveReport | None:
        """Wait until the checkpoint is durable; None if it was skipped or superseded.

        Raises TimeoutError if that takes longer: the save goes on. Raises what the save failed of:
        then no checkpoint was made, and older ones are as they were. But a rank whose own writer
        has died cannot know whether the others had committed it just before.
        """
        if (failure := self.exception(timeout_s)) is not None:
            raise failure
        if self._order is None or self._order.done is None or self._report is None:
            return None
        return self._report(self._order.done)

    def exception(self, timeout_s: float | None = None) -> Exception | None:
        """Wait as `result` does; return what the save failed of instead of raising it."""
        order = self._order
        if order is None or self._writer is None:
            return None
        if not self._writer.wait_for(lambda: order.is_settled, timeout_s):
            raise TimeoutError(
                f"{self.path}: not durable within {timeout_s:g} s; the save goes on, wait again"
            )
        order.is_told = True
        return order.failure
