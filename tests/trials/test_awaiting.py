"""A consumer's prompt may arrive before its chunks are stored.

The consumer waits for them at most as long as computing them takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from kvpipe.connectors.vllm.trial.shapes import SHAPES
from kvpipe.connectors.vllm.trial.trial import Trial
from kvpipe.scheduler.patience import AWAIT_S, Patience
from kvpipe.testing.waiting import eventually
from kvpipe.trace import miss_reasons


@contextmanager
def _consumer(name: str) -> Iterator[tuple[Trial, Callable[[], None]]]:
    """Yield a consumer whose tier is empty, and a function that stores all chunks that the producer has computed."""
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
    """Step until tiers were asked `times` more times, or the prompt has ended.

    Return True if the tiers were asked `times` more times before the prompt ended.
    """

    def step() -> bool:
        trial.do(("step", 0))
        return trial.side.counters["tier_lookup_awaiting"] >= times or not trial.live

    return eventually(step, every_s=0.005) and bool(trial.live)


@pytest.mark.parametrize("name", ["consumer", "async-scheduler-consumer"])
def test_consumer_waits_for_chunks_of_the_producer(name: str) -> None:
    """The prompt arrives before its chunks are stored.

    The prompt hits as soon as its chunks are stored, so no token is computed twice.
    """
    with _consumer(name) as (trial, store):
        trial.do(("add", 0, -1, 0, 1, 0, 0))
        assert _asks(trial, 3)
        assert not trial.side.tracer.misses
        store()
        trial.do(("drain",))
        assert sum(trial.side.tracer.hit_tokens.values()) > 0
        assert not trial.violations


def test_consumer_computes_when_nothing_is_stored_in_time() -> None:
    """After the wait the consumer computes the prompt, because the producer may have ended."""
    with _consumer("consumer") as (trial, _):
        trial.do(("add", 0, -1, 0, 1, 0, 0))
        assert _asks(trial, 2)
        trial.do(("late",))
        trial.do(("drain",))
        assert set(trial.side.tracer.misses) == {miss_reasons.NOT_SAVED}
        assert not trial.violations


def test_engine_that_stores_waits_for_no_producer() -> None:
    """An engine that stores chunks usually computes its prompts itself.

    So no other engine is about to store a missing chunk.
    """
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
    """The wait for a whole chunk is at least the largest age of a disk's listing.

    If the pace of computing is unknown, the wait is `lookup_ms_max`.
    """
    patience = Patience(64.0, 2000, 0)
    patience.pace.s_per_token = s_per_token
    assert patience.await_s_max(tokens, whole=whole) == pytest.approx(wait_s)
