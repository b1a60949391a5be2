"""The worker side, without an engine of vLLM's."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from kvpipe.config import load_settings
from kvpipe.geometry import Geometry, Group, Layer
from kvpipe.testing.pipeline_rig import FakeEngine, Rig, job, plan
from kvpipe.transfer.pages import PageView
from kvpipe.transfer.pool import HostPool
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


@pytest.mark.parametrize("where", ["checked", "orders"])
def test_a_step_that_cannot_be_begun_loses_no_job(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of adapters that cannot be checked every job is reported as failed; what goes wrong with orders costs no job."""
    rig = Rig()
    side = WorkerSide(load_settings(), rig.geometry)
    side.pipeline = rig.pipeline

    def boom(*_: object) -> None:
        raise RuntimeError("boom")

    if where == "checked":
        monkeypatch.setattr(side.adapters, "checked", boom)
        side.bind(plan(job(1)))
    else:
        monkeypatch.setattr(side, "_begin_orders", boom)
        with pytest.raises(RuntimeError, match="boom"):
            side.bind(plan(job(1)))
    rig.save_all()
    side.end_step()
    rig.engine.complete_all()
    assert rig.news() == {1: where == "orders"}
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
