"""A job ends with the last rank's report. A job is done only if every rank succeeds and the job is not in doubt."""

from __future__ import annotations

import itertools

import pytest

from kvpipe.protocol.messages import Tally
from kvpipe.scheduler.reported import Reported, awaited
from kvpipe.statemachine import job as m

RANKS = 3
GOOD, BAD = Tally(1, 0), Tally(0, 1)


@pytest.mark.parametrize("reports", itertools.product((GOOD, BAD), repeat=RANKS))
@pytest.mark.parametrize("tainted_after", [None, 0, 1, 2])
def test_one_failure_or_doubt_loses_the_job(reports: tuple[Tally, ...], tainted_after: int | None) -> None:
    """Ranks report in any order. If one report is failed or doubtful, the whole job fails."""
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
def test_sum_of_all_reports_ends_the_job(reports: Tally) -> None:
    """The reports of all ranks in one step arrive as one sum, which ends the job."""
    job = Reported(m.JOB.compile(), 1, None)
    assert job.count(reports, RANKS)
    assert (job.state.row == m.DONE) == (not reports.bad)


def test_only_jobs_that_were_sent_recently_are_awaited() -> None:
    """If no job was sent recently, the engine does not wait for a report."""
    first, last = Reported(m.JOB.compile(), 1, None), Reported(m.JOB.compile(), 2, None)
    assert not awaited({}, 100.0)
    assert awaited({1: first, 2: last}, 100.0)
    first.sent_at_s -= 1000.0
    assert awaited({1: first, 2: last}, 100.0)
    last.sent_at_s -= 1000.0
    assert not awaited({1: first, 2: last}, 100.0)
