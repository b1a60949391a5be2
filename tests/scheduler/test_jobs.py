"""What is with the ranks is over with the last report, and done only if every rank has done it and nobody doubts it."""

from __future__ import annotations

import itertools

import pytest

from kvpipe.messages import Tally
from kvpipe.scheduler.jobs import Reported, awaited
from kvpipe.statemachine import job as m

RANKS = 3
GOOD, BAD = Tally(1, 0), Tally(0, 1)


@pytest.mark.parametrize("reports", itertools.product((GOOD, BAD), repeat=RANKS))
@pytest.mark.parametrize("tainted_after", [None, 0, 1, 2])
def test_all_or_nothing(reports: tuple[Tally, ...], tainted_after: int | None) -> None:
    """In whatever order the ranks report, and whenever it is doubted, one doubt is enough to lose all of it."""
    job = Reported(m.JOB.compile(), 1, None)
    for i, report in enumerate(reports):
        if tainted_after == i:
            job.fire(m.TAINTED)
        assert not job.state.final
        assert job.count(report, RANKS) == (i == RANKS - 1)
        believed = all(one.ok for one in reports[: i + 1]) and (tainted_after is None or tainted_after > i)
        assert (job.state.row in {m.SENT, m.DONE}) == believed
    assert job.ok + job.bad == RANKS


@pytest.mark.parametrize("reports", [Tally(3, 0), Tally(2, 1), Tally(0, 3)])
def test_reports_that_come_together(reports: Tally) -> None:
    """What the ranks report in one step is added up on the way."""
    job = Reported(m.JOB.compile(), 1, None)
    assert job.count(reports, RANKS)
    assert (job.state.row == m.DONE) == (not reports.bad)


def test_only_what_was_sent_last_is_awaited() -> None:
    """For as long as the patience lasts; nothing that was sent is nothing to wait for."""
    first, last = Reported(m.JOB.compile(), 1, None), Reported(m.JOB.compile(), 2, None)
    assert not awaited({}, 100.0)
    assert awaited({1: first, 2: last}, 100.0)
    first.sent_at_s -= 1000.0
    assert awaited({1: first, 2: last}, 100.0)
    last.sent_at_s -= 1000.0
    assert not awaited({1: first, 2: last}, 100.0)
