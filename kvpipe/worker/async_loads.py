"""Submitted asynchronous loads run in parallel with the steps. A step without compute waits for the oldest load."""

from __future__ import annotations

import time

from kvpipe.threads.loop import LoopThread
from kvpipe.worker.batch import Batch
from kvpipe.worker.outcomes import Outcomes


class AsyncLoads:
    """The asynchronous loads of one rank. Only vLLM's thread calls this class."""

    def __init__(self, loop: LoopThread, outcomes: Outcomes) -> None:
        """`loop` is the thread that handles the completions of copies."""
        self._loop, self._outcomes = loop, outcomes
        self._batches: list[Batch] = []  # the oldest first

    def begun(self, batch: Batch) -> None:
        """Record that every layer of `batch` was submitted."""
        self._forget_landed()
        self._batches.append(batch)

    def await_one(self, wait_s: float) -> None:
        """Wait at most `wait_s` seconds for the oldest load to land.

        If an outcome waits to be collected, do not wait.
        """
        ends_at_s = time.monotonic() + wait_s
        if not self._outcomes.waiting:
            self._loop.settle(wait_s)
        self._forget_landed()
        if not self._batches or self._outcomes.waiting:
            return
        oldest = self._batches[0]
        if oldest.last.wait(max(0.0, ends_at_s - time.monotonic())):
            if oldest.checked is not None:
                oldest.checked.wait(max(0.0, ends_at_s - time.monotonic()))
            self._loop.settle(max(0.0, ends_at_s - time.monotonic()))

    def _forget_landed(self) -> None:
        """Drop the loads that have landed or were given up. Loads land in the order of their submission."""
        while self._batches and (self._batches[0].stuck or self._batches[0].landed):
            del self._batches[0]
