"""Tests this engine with the checks that every engine with kvpipe must pass."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvpipe.scheduler.side import SchedulerSide
from kvpipe.testing.engine_conformance import EngineConformance, Make, Options
from kvpipe.worker.side import WorkerSide
from tests.second_engine.adapter import KVPipe
from tests.second_engine.engine import Engine, Request
from tests.second_engine.prompts import MODEL


class ToyDriver:
    """Adapts the engine to the checks' `Driver` interface."""

    def __init__(self, options: Options | None) -> None:
        """Create an engine, with kvpipe if there are `options`."""
        self._engine, self._requests = Engine(MODEL, ranks=2), dict[str, Request]()
        if options is not None:
            keys = {"chunk_tokens": 8, "pool_bytes_max": "4MiB", **options.keys}
            self._kvpipe = KVPipe(self._engine, make_copier=options.copier, **keys)

    @property
    def scheduler(self) -> SchedulerSide:
        """See `Driver`."""
        return self._kvpipe.scheduler

    @property
    def workers(self) -> Sequence[WorkerSide]:
        """See `Driver`."""
        return self._kvpipe.workers

    @property
    def busy(self) -> bool:
        """See `Driver`."""
        return self._engine.busy

    @property
    def free_blocks(self) -> int:
        """See `Driver`."""
        return self._engine.blocks.free()

    def add(self, request_id: str, prompt: Sequence[int], new_tokens: int) -> None:
        """See `Driver`."""
        self._requests[request_id] = self._engine.add(request_id, prompt, new_tokens)

    def step(self) -> None:
        """See `Driver`."""
        self._engine.step()

    def answer(self, request_id: str) -> object:
        """See `Driver`. Answers are compared to the last bit of the logits."""
        request = self._requests[request_id]
        return request.output, [one.tolist() for one in request.logits]

    def preempt(self, request_id: str) -> bool:
        """See `Driver`."""
        return self._engine.preempt_soon(request_id)

    def abort(self, request_id: str) -> None:
        """See `Driver`."""
        self._engine.abort(self._requests[request_id])

    def forget(self) -> None:
        """See `Driver`."""
        self._engine.blocks.clear()

    def reset(self) -> None:
        """See `Driver`."""
        self._engine.reset()

    def shutdown(self) -> None:
        """See `Driver`."""
        self._kvpipe.shutdown()


class TestSecondEngine(EngineConformance):
    """The engine meets kvpipe's requirements."""

    @pytest.fixture
    def make(self) -> Make:
        """Return the function that makes an engine."""
        return ToyDriver
