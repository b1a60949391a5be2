"""The watchdog checks copies on the loop thread while other threads complete copies."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import anyio
import pytest

from kvpipe.protocol.messages import Kind
from kvpipe.testing.waiting import WAIT_S
from kvpipe.threads.loop import LoopThread
from kvpipe.worker.watchdog import Watchdog
from tests.rigs.pipeline_rig import Rig, job, plan


class EndedError(Exception):
    """The exception that the test raises when the watchdog sleeps after its first check."""


@pytest.mark.parametrize("raises", [False, True])
def test_watchdog_handles_a_copy_that_lands_during_its_look(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, *, raises: bool
) -> None:
    """A copy lands during the watchdog's check.

    The completing thread cannot handle the inbox, because the watchdog has the turn, so the watchdog handles it.
    """

    def look(*_args: object) -> bool:
        assert rig.pipeline.copies.loop.turn.locked()
        rig.engine.complete_all()
        if raises:
            raise EndedError
        return False

    sleeps: Iterator[bool] = iter([True])

    async def sleep(_seconds: float) -> None:
        if not next(sleeps, False):
            raise EndedError

    rig.pipeline.begin(plan(job(1, Kind.LOAD_ASYNC)))
    rig.pipeline.start_loads()
    rig.settle()
    monkeypatch.setattr(Watchdog, "_is_stuck", look)
    monkeypatch.setattr(anyio, "sleep", sleep)
    with pytest.raises(EndedError):
        asyncio.run(Watchdog(rig.pipeline.copies, rig.engine.abandon, 1000).run())
    assert [outcome.job.id for outcome in rig.pipeline.copies.outbox] == [1]


def test_watchdog_looks_only_after_its_pipeline_knows_the_loop_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop thread may run before its constructor returns, and the first check is due at once."""
    sleep, start, naps = anyio.sleep, LoopThread.__init__, iter([0.0])
    looked = threading.Event()

    async def nap(_seconds: float) -> None:
        seconds = next(naps, WAIT_S)
        if seconds:
            looked.set()
        await sleep(seconds)

    def slowly(loop: LoopThread, *args: object, **options: object) -> None:
        start(loop, *args, **options)  # type: ignore[arg-type]
        for _ in range(5):
            loop.put(int)
            assert loop.settle(WAIT_S)

    monkeypatch.setattr(anyio, "sleep", nap)
    monkeypatch.setattr(LoopThread, "__init__", slowly)
    rig = Rig()
    assert looked.wait(WAIT_S)
    rig.pipeline.shutdown()
    assert rig.pipeline.copies.loop.errors == 0
