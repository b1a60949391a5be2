"""The worker side, without an engine of vLLM's."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import pytest
import torch

from kvpipe.config import load_settings
from kvpipe.geometry import Geometry, Group, Layer
from kvpipe.messages import Kind, Tally
from kvpipe.testing.pipeline_rig import FakeEngine, Rig, job, plan
from kvpipe.transfer.base import Direction
from kvpipe.transfer.pages import PageView
from kvpipe.transfer.pool import HostPool
from kvpipe.worker.limits import Limits
from kvpipe.worker.side import WorkerSide

GEOMETRY = Geometry((Group((Layer("a", 1024), Layer("b", 1024)), block_tokens=4),), 16, 4 * 8192)
CACHES = {name: torch.zeros(8, 1, 4, 64) for name in "ab"}


class Attached(FakeEngine):
    """Notes when it is attached and shut down."""

    def __init__(self, name: str, calls: list[str]) -> None:
        """`calls`: of all engines."""
        super().__init__()
        self._name, self._calls = name, calls

    def attach(self, views: Sequence[PageView], geometry: Geometry, pool: HostPool) -> None:
        """See `TransferEngine.attach`."""
        super().attach(views, geometry, pool)
        self._calls.append(f"{self._name} attached")

    def shutdown(self) -> None:
        """See `TransferEngine.shutdown`."""
        super().shutdown()
        self._calls.append(f"{self._name} shut down")


def test_caches_that_are_registered_again() -> None:
    """The first engine is shut down before the second is attached: it may hold what that needs, pinned memory say."""
    calls: list[str] = []
    side = WorkerSide(load_settings({"prefault": "use"}), GEOMETRY)
    for name in ("first", "second"):
        side.register(CACHES, 8, Attached(name, calls), unhooked=frozenset(), replays=False, fences_late=False)
    side.shutdown()
    assert calls == ["first attached", "first shut down", "second attached", "second shut down"]


def _boom(*_: object) -> None:
    raise RuntimeError("boom")


def _begin_raises(where: str, rig: Rig, side: WorkerSide, patch: pytest.MonkeyPatch) -> None:
    """Let the next `bind` raise; job 9 is of the step before, as far as there is one."""
    if where == "checked":
        patch.setattr(side.adapters, "checked", _boom)
    elif where == "orders":
        patch.setattr(side, "_begin_orders", _boom)
    elif where in {"fence", "withdraw"}:
        side.bind(plan(job(9)))
        rig.save_all()
        if where == "fence":
            side.end_step()
            side.unbind()
        patch.setattr(rig.engine, "fence", _boom)
    elif where == "limits":
        patch.setattr(Limits, "refused", _boom)
    else:
        direction, prepare = Direction[where], rig.engine.prepare
        patch.setattr(rig.engine, "prepare", lambda p: _boom() if p.direction is direction else prepare(p))


@pytest.mark.parametrize("where", ["checked", "orders", "fence", "withdraw", "limits", "SAVE", "LOAD"])
def test_a_step_that_cannot_be_begun_loses_no_job(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every job is reported as failed, blocks of sync loads in their own step; wrong orders cost no job."""
    rig = Rig(fences_late=True)
    side = WorkerSide(load_settings(), rig.geometry)
    side.pipeline, good = rig.pipeline, where == "orders"
    with monkeypatch.context() as patch:
        _begin_raises(where, rig, side, patch)
        with contextlib.nullcontext() if where == "checked" else pytest.raises(RuntimeError, match="boom"):
            side.bind(plan(job(1), job(2, Kind.LOAD_SYNC, [(0, 0, 0, 7)]), job(3, Kind.LOAD_ASYNC, [(0, 0, 0, 8)])))
    side.start_loads()
    rig.wait_all()
    rig.save_all()
    side.end_step()
    ended = [side.collect()]
    assert side.take_bad_blocks() == (set() if good else {7})
    side.unbind()
    assert not rig.busy()
    rig.engine.complete_all()
    rig.settle()
    ended.append(side.collect())
    report = side.take_report()
    assert report is not None
    before = {9: Tally(0, 1)} if where in {"fence", "withdraw"} else {}
    assert report.tallies == dict.fromkeys((1, 2, 3), Tally(int(good), int(not good))) | before
    assert [one for one in ended if any(one)] == [({"r3"}, set() if good else {"r3"})]
    assert not rig.in_flight()
    assert not side.take_bad_blocks()
    side.bind(plan(job(10)))
    rig.save_all()
    side.end_step()
    rig.engine.complete_all()
    assert rig.news() == {10: True}
    assert not rig.counters["illegal_transition"]
    assert not rig.pipeline.copies.loop.errors
    side.shutdown()


def test_a_shutdown_goes_on_though_a_part_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """The carrier's thread ends though the pipeline's did not."""
    side, ended = WorkerSide(load_settings(), GEOMETRY), list[str]()

    class Part:
        def __init__(self, name: str) -> None:
            self.name = name

        def shutdown(self) -> None:
            ended.append(self.name)
            raise RuntimeError(self.name)

        stop = shutdown

    for name in ("_readier", "pipeline", "carrier"):
        monkeypatch.setattr(side, name, Part(name))
    with pytest.raises(RuntimeError, match="carrier"):
        side.shutdown()
    assert ended == ["_readier", "pipeline", "carrier"]
