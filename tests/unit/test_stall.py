"""When a hit's load is asynchronous: never when nobody else would wait, always when somebody would wait too long."""

from __future__ import annotations

import pytest

from kvpipe.connectors.vllm.metadata import ReportMetadata, Tally
from kvpipe.connectors.vllm.stall import Stall
from kvpipe.geometry import Geometry, Group, Layer
from kvpipe.plan import Kind
from tests.unit.fakes import Rig, job, plan

TOKEN_BYTES = 2 * 100 // 4  # two layers, pages of 100 bytes for 4 tokens
GEOMETRY = Geometry((Group((Layer("a", 100), Layer("b", 100)), block_tokens=4),), 16, 1 << 20)


@pytest.mark.parametrize(
    ("running", "loading", "rate", "stall_ms_max", "expected"),
    [
        (0, False, 1.0, 50, False),  # nobody waits, however slow
        (0, True, 1.0, 0, False),
        (1, False, 0.0, 50, False),  # never measured
        (1, False, 1000 * TOKEN_BYTES / 0.05, 50, False),  # just in time
        (1, False, 999 * TOKEN_BYTES / 0.05, 50, True),
        (1, True, 1e12, 50, True),  # it would queue behind the other
        (1, False, 0.0, 0, True),  # no wait is allowed
    ],
)
def test_who_waits_for_whom(running: int, loading: bool, rate: float, stall_ms_max: int, expected: bool) -> None:
    """A load of 1000 tokens against what others would have to wait for it."""
    stall = Stall(GEOMETRY, stall_ms_max)
    stall.running, stall.rate = running, rate
    assert stall.too_long(1000, loading=loading) is expected


@pytest.mark.parametrize(("mine", "other", "slowest"), [(0, 5, 5), (5, 0, 5), (7, 5, 5), (0, 0, 0)])
def test_the_slowest_rank_counts(mine: float, other: float, slowest: float) -> None:
    """Ranks that have loaded nothing yet say nothing."""
    report = ReportMetadata({1: Tally(1, 0)}, rate=mine)
    report.aggregate(ReportMetadata({1: Tally(1, 0)}, rate=other))
    assert report.rate == slowest


def test_the_rate_is_that_of_copies_not_of_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that land together share their time; time in which none was under way does not count."""
    rig = Rig()
    now = [1_000_000_000]
    monkeypatch.setattr("time.monotonic_ns", lambda: now[0])
    pages = [rig.geometry.groups[g].layers[i].page_bytes for g, i in rig.geometry.layers]
    rig.pipeline.begin(plan(job(1, Kind.LOAD_ASYNC)))
    rig.pipeline.start_loads()
    assert rig.pipeline.load_rate == 0
    now[0] += 500_000
    rig.engine.complete_all()  # all three at once
    rig.settle()
    assert rig.pipeline.load_rate == pytest.approx(sum(pages) / 500e-6)
    now[0] += 3_000_000_000  # nothing to do for three seconds
    rig.pipeline.end_step()
    rig.pipeline.begin(plan(job(2, Kind.LOAD_ASYNC)))
    rig.pipeline.start_loads()
    now[0] += 500_000
    rig.engine.complete_all()
    rig.settle()
    assert rig.pipeline.load_rate == pytest.approx(sum(pages) / 500e-6)
    rig.pipeline.shutdown()
