"""A consumer's prompt may come before it is stored. The consumer then waits as long as computing would take."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from kvpipe.cache import miss_reasons
from kvpipe.connectors.vllm.trial.shapes import SHAPES
from kvpipe.connectors.vllm.trial.trial import Trial
from kvpipe.scheduler.patience import AWAIT_S, Patience
from kvpipe.testing.waiting import eventually


@contextmanager
def _consumer(name: str) -> Iterator[tuple[Trial, Callable[[], None]]]:
    """Yield a consumer whose tier is empty, and what stores there all that the producer has computed."""
    trial = Trial(SHAPES[name], 2)
    tier = trial.tiers[0]
    tier.values, kept = {}, dict(tier.values)
    assert trial.side.staging is not None
    trial.side.staging.patience.await_s = AWAIT_S
    try:
        yield trial, lambda: tier.values.update(kept)
    finally:
        trial.close()


def _asks(trial: Trial, times: int) -> bool:
    """Step until the tiers were asked so many times more, or the prompt is over. Return whether they were."""

    def step() -> bool:
        trial.do(("step", 0))
        return trial.side.counters["tier_lookup_awaiting"] >= times or not trial.live

    return eventually(step, every_s=0.005) and bool(trial.live)


@pytest.mark.parametrize("name", ["consumer", "async-scheduler-consumer"])
def test_consumer_waits_for_what_the_producer_stores(name: str) -> None:
    """The prompt comes first, and is hit as soon as it is stored: nothing is computed twice."""
    with _consumer(name) as (trial, store):
        trial.do(("add", 0, -1, 0, 1, 0, 0))
        assert _asks(trial, 3)
        assert not trial.side.report.misses
        store()
        trial.do(("drain",))
        assert sum(trial.side.report.hit_tokens.values()) > 0
        assert not trial.violations


def test_consumer_computes_when_nothing_is_stored_in_time() -> None:
    """It has waited long enough: the producer may be gone."""
    with _consumer("consumer") as (trial, _):
        trial.do(("add", 0, -1, 0, 1, 0, 0))
        assert _asks(trial, 2)
        trial.do(("late",))
        trial.do(("drain",))
        assert set(trial.side.report.misses) == {miss_reasons.NOT_SAVED}
        assert not trial.violations


def test_engine_that_stores_waits_for_no_producer() -> None:
    """Its prompts are new, as a rule."""
    with _consumer("tier") as (trial, _):
        trial.do(("add", 0, -1, 0, 1, 0, 0))
        trial.do(("drain",))
        assert not trial.side.counters["tier_lookup_awaiting"]


@pytest.mark.parametrize(
    ("s_per_token", "tokens", "whole", "wait_s"),
    [
        (0.0, 1000, True, 2.0),
        (0.001, 1000, True, 1.0),
        (0.001, 10, True, AWAIT_S),
        (0.001, 10, False, 0.01),
    ],
)
def test_wait_is_as_long_as_computing_takes(s_per_token: float, tokens: int, whole: bool, wait_s: float) -> None:
    """At least as long as a disk's listing may be old, where a whole chunk is lacking. No pace: `lookup_ms_max`."""
    patience = Patience(64.0, 2000, 0)
    patience.pace.s_per_token = s_per_token
    assert patience.await_s_max(tokens, whole=whole) == pytest.approx(wait_s)
