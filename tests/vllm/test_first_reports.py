"""Ranks send their first report with an engine's first step.

Still, the first prompt is looked up and saved like later prompts, and remote prefills are not delayed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvpipe.connectors.vllm.hints import is_prefilled_elsewhere
from kvpipe.connectors.vllm.metadata import Introduction, ReportMetadata
from kvpipe.connectors.vllm.trial.shapes import SHAPES, Shape
from kvpipe.connectors.vllm.trial.trial import Trial
from kvpipe.protocol.engine import LATER, MISS, Hit
from kvpipe.protocol.messages import Report
from kvpipe.scheduler.lookups import FIRST_STEPS_MAX
from kvpipe.trace import miss_reasons
from tests.rigs.scheduler_world import UNIT, SchedulerWorld


@contextmanager
def _new_engine(shape: Shape, *, unmet: bool = True) -> Iterator[Trial]:
    """Yield an engine that has made no step. If `unmet`, the engine's ranks have not reported yet."""
    trial = Trial(shape._replace(unmet=unmet), 2)
    try:
        yield trial
    finally:
        trial.close()


@pytest.mark.parametrize("name", ["sibling-behind", "two-siblings"])
def test_ranks_leave_the_handshake_to_other_connectors(name: str) -> None:
    """Whichever connector is first, the other connector gets the handshakes of all ranks.

    kvpipe's first reports come with a step.
    """
    with _new_engine(SHAPES[name]) as trial:
        assert all(rank.kvpipe.get_handshake_metadata() is None for rank in trial.ranks)
        trial.do(("drain",))
        assert not trial.side.weights.awaited


@pytest.mark.parametrize("name", ["two-tiers", "pipeline-2", "async-scheduler-tier"])
def test_idle_engine_steps_until_its_ranks_have_reported(name: str) -> None:
    """No request has arrived. The steps before the reports compute nothing."""
    with _new_engine(SHAPES[name]) as trial:
        side: Any = trial.side
        assert not side.staging.space.name
        assert trial.scheduler.has_requests()
        trial.do(("step", 0))
        trial.do(("drain",))
        assert side.staging.space.name
        assert not trial.scheduler.has_requests()
        assert trial.steps < 4


@pytest.mark.parametrize("name", ["consumer", "async-scheduler-consumer"])
def test_first_prompt_hits_a_tier(name: str) -> None:
    """The prompt arrives before the first step. Its first lookup is put off until the ranks have reported."""
    found = []
    for unmet in (False, True):
        with _new_engine(SHAPES[name], unmet=unmet) as trial:
            trial.do(("add", 0, -1, 0, 1, 0, 0))
            trial.do(("drain",))
            assert not trial.violations
            assert trial.side.counters["lookup_later"] >= unmet
            found.append(trial.side.tracer.hit_tokens)
    assert found[0] == found[1]
    assert sum(found[1].values()) > 0


@pytest.mark.parametrize("name", ["two-ranks", "async-scheduler", "either-load"])
def test_first_prompt_is_saved_whole(name: str) -> None:
    """No save is planned before the ranks have reported. After the reports, all units of the prompt are saved."""
    saved = []
    for unmet in (False, True):
        with _new_engine(SHAPES[name], unmet=unmet) as trial:
            trial.do(("add", 0, -1, 0, 1, 0, 0))
            trial.do(("drain",))
            saved.append({k: trial.side.counters[k] for k in ("pieces_published", "save_dropped_pool_full")})
    assert saved[0] == saved[1]
    assert saved[1]["pieces_published"]


def test_lookups_miss_when_ranks_never_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """After some steps, lookups no longer wait for the reports and miss. Nothing is saved, and the fault is counted."""
    with _new_engine(SHAPES["sync"]) as trial:
        monkeypatch.setattr(trial.ranks[0].connector, "build_connector_worker_meta", lambda: None)
        trial.excused |= {"weights_not_on_all_ranks"}
        for _ in range(FIRST_STEPS_MAX + 1):
            trial.do(("step", 0))
        assert not trial.scheduler.has_requests()
        assert trial.side.counters["weights_not_on_all_ranks"] == 1
        before = trial.side.counters["lookup_later"]
        for _ in range(2):
            trial.do(("add", 0, 150, 0, 1, 0, 0))
            trial.do(("drain",))
        assert trial.side.counters["lookup_later"] == before
        assert trial.side.tracer.misses == {miss_reasons.WEIGHTS: 2}
        assert not trial.side.jobs.in_flight


def test_rank_with_another_pool_is_named_in_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """The jobs of such a rank fail, so the engine serves without a cache.

    One line of the log reports the different pool, and no line blames the tiers.
    """
    lines = list[dict[str, Any]]()
    monkeypatch.setattr("kvpipe.connectors.vllm.scheduler_role.warn", lambda _, **fields: lines.append(fields))
    with _new_engine(SHAPES["two-ranks"]) as trial:
        role = trial.kvpipe.scheduler_role  # type: ignore[union-attr]
        ranks = [Introduction(rank, "layout", f"w{rank}", 8) for rank in range(2)]
        role.meet(ranks)
        assert not [line for line in lines if "ranks" in line]
        role.meet([ranks[0], ranks[1]._replace(pool=b"memory")])
        assert [line["ranks"] for line in lines if "ranks" in line] == [[1]]
        assert not role.counters["tiers_not_on_all_ranks"]


def test_introductions_of_all_ranks_are_added_up() -> None:
    """Reports are added up in any order, with vLLM's own code for adding up reports."""
    ranks = [Introduction(rank, "layout", f"w{rank}", 8 - rank) for rank in range(3)]
    metas = [ReportMetadata(Report(ready={one.rank: one.slots}), (one,)) for one in ranks]
    metas[2].aggregate(metas[0]).aggregate(metas[1])
    assert sorted(metas[2].introductions) == ranks
    assert metas[2].report.ready == {0: 8, 1: 7, 2: 6}


@pytest.mark.parametrize(
    ("parameters", "elsewhere"),
    [
        (None, False),
        ({}, False),
        ({"do_remote_prefill": False}, False),
        ({"do_remote_prefill": True}, True),
        ("x", False),
    ],
)
def test_remote_prefill_is_read_from_the_parameters(parameters: Any, elsewhere: bool) -> None:
    """A client may send parameters of any type."""
    assert is_prefilled_elsewhere(cast("Any", SimpleNamespace(kv_transfer_params=parameters))) is elsewhere


@pytest.mark.parametrize(("held", "hit"), [(8, 8 * UNIT - 1), (7, 7 * UNIT), (6, 0), (0, 0)])
def test_hit_beside_a_remote_prefill_has_all_but_the_last_unit(held: int, hit: int) -> None:
    """The prompt has eight units. A hit of fewer than seven units is a miss with its own reason."""
    world = SchedulerWorld()
    if held:
        first = world.request("first", held, shared=held)
        world.admit(first)
        world.succeed(*world.step(first))
    again = world.request("again", 8, shared=held)
    answer = world.side.lookup(again, 0, elsewhere=True)
    assert answer == (Hit(hit, waits=False) if hit else MISS)
    asking = world.side.requests.tracked["again"].asking
    assert (asking.why == miss_reasons.ELSEWHERE) is (held == 6)
    world.admit(again)


def test_remote_prefill_is_never_put_off() -> None:
    """Its lookup is not put off even while weights are in doubt: the prefill engine's lease could end meanwhile."""
    world = SchedulerWorld()
    world.side.weights.suspect()
    first, second = world.request("first", 4), world.request("second", 4)
    assert world.side.lookup(first, 0) is LATER
    assert world.side.lookup(second, 0, elsewhere=True) == MISS
    assert world.side.requests.tracked["second"].asking.why == miss_reasons.WEIGHTS
