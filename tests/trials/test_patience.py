"""A tier is slow if reading a token takes longer than computing it.

Only some requests wait for a slow tier, and only for a limited time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from statistics import mean

import pytest

from benchmarks.replay.engine import Engine
from benchmarks.replay.model import Host, Model, Store, disk
from benchmarks.replay.workload import coding_agents
from kvpipe.connectors.vllm.trial.shapes import CONSUMER, PRODUCER, Shape
from kvpipe.connectors.vllm.trial.trial import Trial
from kvpipe.protocol.messages import Report
from kvpipe.scheduler.pace import PREFILL_TOKENS_MIN, Pace
from kvpipe.scheduler.patience import TRIED_EVERY, Patience
from kvpipe.statemachine import stage as m
from tests.trials.test_fetches import ADD, SHAPE, Played, _chunks, in_play
from tests.trials.test_overload import STEP, _brought, _busy


def _patience(bytes_per_s: float = 900.0, s_per_token: float = 0.01, slow_ms_max: int = 0) -> Patience:
    """Return the patience of an engine with 10 bytes per token and one tier."""
    patience = Patience(10.0, 1000, slow_ms_max)
    patience.pace.s_per_token = s_per_token
    patience.rates = {0: bytes_per_s}
    return patience


@pytest.mark.parametrize(
    ("bytes_per_s", "s_per_token", "slow"),
    [(900, 0.01, True), (1100, 0.01, False), (900, 0.0, False), (0, 0.01, False)],
)
def test_tier_is_slow_if_its_known_rate_is_below_the_rate_of_computing(
    bytes_per_s: float, s_per_token: float, *, slow: bool
) -> None:
    """A token has 10 bytes and takes `s_per_token` to compute. A tier that was never read has no known rate."""
    assert _patience(bytes_per_s, s_per_token).slow(0) is slow
    assert not _patience(bytes_per_s, s_per_token).slow(1)


def test_the_busier_an_engine_is_the_slower_a_tier_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy engine accepts a slower tier, because computing a prompt would delay other requests."""
    assert _patience(600.0).slow(0)
    monkeypatch.setattr(Pace, "load", 0.5)
    assert not _patience(600.0).slow(0)
    assert _patience(400.0).slow(0)
    monkeypatch.setattr(Pace, "load", 1.0)
    assert not _patience(1.0).slow(0)


def test_no_request_skips_a_tier_when_waiting_costs_nothing() -> None:
    """No request skips a tier while the engine has no room or computes other prompts, or if settings forbid skips."""
    assert _patience().passes(asked=True)
    assert not _patience().passes(asked=False)
    assert not _patience(slow_ms_max=1).passes(asked=True)
    busy = _patience()
    busy.pace.step([PREFILL_TOKENS_MIN], 0.0)
    assert not busy.passes(asked=True)
    assert busy.wait_s_max(0, slow=True) == 1.0


def test_some_requests_still_use_a_slow_tier() -> None:
    """Every few requests, one still reads a slow tier.

    Otherwise no read would show that the tier has become fast again.
    """
    patience = _patience()
    assert [patience.passes(asked=True) for _ in range(3 * TRIED_EVERY)].count(False) == 3


def test_wait_is_at_least_the_time_to_compute_the_fetched_tokens() -> None:
    """The wait is at least the time to compute the tokens that were fetched so far.

    The wait for a slow tier is never longer than `lookup_ms_max`.
    """
    assert _patience().wait_s_max(0, slow=False) == 1.0
    assert _patience().wait_s_max(0, slow=True) == 0.0
    assert _patience().wait_s_max(50, slow=True) == 0.5
    assert _patience(slow_ms_max=200).wait_s_max(0, slow=True) == 0.2
    assert _patience(slow_ms_max=9000).wait_s_max(0, slow=True) == 1.0


def test_the_slowest_rank_counts() -> None:
    """The rate of a tier is the lowest rate among the ranks that have read the tier."""
    report = Report(tier_rates={0: 5.0, 1: 2.0})
    report.add(Report(tier_rates={0: 3.0, 2: 4.0}))
    assert report.tier_rates == {0: 3.0, 1: 2.0, 2: 4.0}


@contextmanager
def _slow(shape: Shape = SHAPE) -> Iterator[Played]:
    """Yield a trial with slow tiers that ranks have already read."""
    with in_play(shape) as played:
        played.run()
        played.forget()
        patience = played.staging.patience
        assert patience.rates[0] > 0
        patience.pace.s_per_token = 1e-12
        yield played


def test_request_does_not_wait_for_a_slow_tier() -> None:
    """A request that skips a slow tier is computed at once. The reason is reported, and nothing is fetched."""
    with _slow() as played:
        side, before = played.trial.side, _brought(played)
        fetched = side.counters["chunks_fetched"]
        played.run()
        assert (_brought(played), side.counters["chunks_fetched"]) == (before, fetched)
        assert (side.counters["tier_lookup_slow"], side.counters["tier_lookup_late"]) == (1, 0)
        assert side.tracer.misses["tier_slow"] == 1


def test_request_that_tries_a_slow_tier_waits_for_one_step() -> None:
    """Some chunks are fetched, and the wait ends in the next step.

    Chunks that arrive later can serve other requests.
    """
    with _slow() as played:
        played.staging.patience._slow = TRIED_EVERY - 1
        played.do(ADD, *STEP, ("hold", True), *STEP)
        assert played.staging.orders
        played.do(*STEP)
        assert played.waiting == []
        assert played.trial.side.tracer.misses["tier_slow"] == 1
        played.do(("hold", False), ("drain",))


def test_request_that_waits_for_blocks_gets_chunks_of_a_slow_tier() -> None:
    """The chunks are fetched while the request waits for blocks. When blocks are free, the chunks are loaded."""
    with _slow() as played:
        before = _brought(played)
        played.do(ADD, *STEP)
        with _busy(played, asks=False):
            played.do(*STEP * 3)
            assert played.waiting == [m.HELD]
        played.do(("drain",))
        assert _brought(played) >= before + 128


def test_requests_wait_for_a_slow_tier_during_a_burst_of_prompts() -> None:
    """During a burst of prompts, requests wait for a slow tier. After the burst, no request waits for the tier."""
    with _slow() as played:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Pace, "busy", True)
            played.do(ADD, *STEP, ("hold", True), *STEP * 3)
            assert played.waiting == [m.FETCHING]
        played.do(*STEP)
        assert played.waiting == []
        played.do(("hold", False), ("drain",))


def test_only_chunks_of_the_fast_tier_are_fetched() -> None:
    """Only the chunks of the fast tier are fetched. The rest of the prompt is in the slow tier, and is computed."""
    with in_play(SHAPE._replace(tiers=2, pool_slots=24)) as played:
        values = played.trial.tiers[0].values
        whole = next(name for name in values if name in _chunks(values))
        for name in {*values} - {whole}:
            del values[name]
        patience = played.staging.patience
        patience.rates, patience.pace.s_per_token = {0: 1e18, 1: 1.0}, 1e-12
        took = played.run()
        assert took["dict-0"] > 0
        assert "dict-1" not in took
        assert played.trial.side.counters["tier_lookup_slow"] == 1


@pytest.mark.parametrize(("role", "waits"), [(PRODUCER, False), ("kv_both", False), (CONSUMER, True)])
def test_an_engine_that_only_loads_waits(role: str, *, waits: bool) -> None:
    """A consumer gets its chunks from engines that compute, so it waits for a slow tier instead of computing."""
    trial = Trial(SHAPE._replace(role=role, load="async", events=False), 2)
    try:
        assert trial.side.staging is not None
        patience = trial.side.staging.patience
        assert (patience.wait_s_max(0, slow=True) == patience.lookup_s_max) is waits
    finally:
        trial.close()


def test_a_slow_disk_costs_no_time() -> None:
    """With a slow disk, first tokens come as early as without the disk, although a few requests try the disk."""
    sessions, model = coding_agents(5, sessions=8, hours=0.5, chunk_tokens=512), Model(device_tokens=400_000)

    def ttft_s(*tiers: Store) -> float:
        return mean(Engine(sessions, "lru", model=model, host=Host(400), tiers=tiers).run().ttft_s)

    alone_s = ttft_s()
    assert ttft_s(replace(disk(1200), read_bytes_per_s=2e8)) < 1.03 * alone_s
    assert ttft_s(disk(1200)) < 0.97 * alone_s
