"""Asynchronous loads that were submitted: they go on beside the steps. Those that compute nothing wait for one."""

from __future__ import annotations

import time

from kvpipe.loop import LoopThread
from kvpipe.worker.batch import Batch
from kvpipe.worker.outcomes import Outcomes


class AsyncLoads:
    """Those of one rank. On vLLM's thread alone."""

    def __init__(self, loop: LoopThread, outcomes: Outcomes) -> None:
        """`loop`: what handles the completions of copies."""
        self._loop, self._outcomes = loop, outcomes
        self._batches: list[Batch] = []  # the oldest first

    def begun(self, batch: Batch) -> None:
        """Every layer of `batch` was submitted."""
        self._forget_landed()
        self._batches.append(batch)

    def await_one(self, wait_s: float) -> None:
        """Wait for a load to land, at most `wait_s` seconds. Not if there is none, or something to collect."""
        ends_at_s = time.monotonic() + wait_s
        if not self._outcomes.waiting:
            self._loop.settle(wait_s)
        self._forget_landed()
        if not self._batches or self._outcomes.waiting:
            return
        oldest = self._batches[0].last
        if oldest is not None and oldest.wait(max(0.0, ends_at_s - time.monotonic())):
            self._loop.settle(max(0.0, ends_at_s - time.monotonic()))

    def _forget_landed(self) -> None:
        """Drop loads that have landed, or were given up. They land in the order of submission."""
        while self._batches and (self._batches[0].stuck or self._batches[0].landed):
            del self._batches[0]
