"""Replays of the scheduler side in virtual time account for every token, and their time only advances."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from benchmarks.replay import page, report
from benchmarks.replay.engine import COMPUTED, DEVICE, Engine, Outcome
from benchmarks.replay.model import Host, Link, Model, Store, disk, network
from benchmarks.replay.tiers import Clock
from benchmarks.replay.workload import Prompt, Workload, coding_agents
from kvpipe.cache import catalog
from kvpipe.scheduler import fetches
from kvpipe.scheduler.pace import Pace

SMALL = Model(device_tokens=140_000)
DISK, NETWORK = disk(1200), network(1 << 20)


@cache
def load() -> Workload:
    """Return a few sessions."""
    return coding_agents(5, sessions=4, hours=0.1, chunk_tokens=512)


@cache
def replayed(*tiers: Store, slots: int = 400, policy: str = "lru") -> tuple[Engine, Outcome]:
    """Replay the sessions on a device with little memory."""
    engine = Engine(load(), policy, model=SMALL, host=Host(slots), tiers=tiers)
    return engine, engine.run()


@pytest.mark.parametrize(
    ("policy", "tiers"),
    [("lru", ()), ("s3fifo", ()), ("lru", (DISK,)), ("lru", (NETWORK,)), ("s3fifo", (DISK, NETWORK))],
)
def test_every_token_is_accounted_for(policy: str, tiers: tuple[Store, ...]) -> None:
    """Each token is computed or comes from a cache.

    Each loaded chunk was transferred. At the end nothing is in flight or used.
    """
    engine, out = replayed(*tiers, policy=policy)
    assert out.requests == len(load().prompts)
    assert sum(out.tokens.values()) == load().tokens
    assert set(out.tokens) <= {DEVICE, COMPUTED, "memory", *(tier.name for tier in tiers)}
    loaded = sum(tokens for where, tokens in out.tokens.items() if where not in {DEVICE, COMPUTED})
    assert loaded > 0
    in_part = out.requests  # one token of the last chunk of a hit may be computed
    assert 0 <= out.moved["memory to device"] - loaded * SMALL.bytes_per_token <= in_part * SMALL.bytes_per_token
    for tier in tiers:
        assert out.moved[f"{tier.name} to memory"] >= out.tokens[tier.name] * SMALL.bytes_per_token
    assert not out.faults
    side = engine.side
    assert (side.jobs.in_flight, side.requests.tracked, side.catalog.writing) == ({}, {}, 0)
    assert engine.device.used == 0


def test_more_tiers_mean_fewer_computed_tokens() -> None:
    """A tier behind memory reduces the number of computed tokens. Without kvpipe most tokens are computed."""
    none, memory, behind = (
        replayed(*tiers, slots=slots)[1].tokens[COMPUTED] for slots, tiers in ((0, ()), (400, ()), (400, (DISK,)))
    )
    assert none > 1.2 * memory
    assert memory > 1.1 * behind
    assert not any(replayed(slots=0)[1].moved.values())


def test_request_waits_for_chunks_that_arrive_sooner_than_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request waits for chunks that arrive before it could compute them, even longer than `lookup_ms_max`.

    Few requests wait if the disk is slower than computing.
    """

    def computed(bytes_per_s: float) -> int:
        tiers = [replace(DISK, read_bytes_per_s=bytes_per_s)]
        out = Engine(load(), "lru", model=SMALL, host=Host(400), tiers=tiers, lookup_ms_max=50).run()
        return out.tokens[COMPUTED]

    quick, slow = computed(6e9), computed(2e8)
    monkeypatch.setattr(Pace, "step", lambda *_: None)
    assert quick < 0.95 * computed(6e9)
    assert slow == pytest.approx(computed(2e8), rel=0.02)


def test_a_replay_repeats_itself() -> None:
    """Two replays are equal, except for the time that the scheduler takes."""
    again = Engine(load(), "lru", model=SMALL, host=Host(400), tiers=[DISK]).run()
    assert replace(again, scheduler_s=0.0) == replace(replayed(DISK)[1], scheduler_s=0.0)


def test_no_first_token_before_its_prompt_is_computed() -> None:
    """Each time to first token is at least the time to compute the missing tokens.

    The real clock is restored afterwards.
    """
    _, out = replayed(DISK)
    assert min(out.ttft_s) >= SMALL.step_s
    assert out.ttft(0.5) <= out.ttft(0.9) <= out.ttft(1.0) == max(out.ttft_s)
    assert {vars(module)["time"] for module in (fetches, catalog)} == {time}


def test_a_hit_is_as_quick_as_in_the_model() -> None:
    """Requests run one at a time.

    The first prompt is computed, a second prompt evicts its KV from the device, and the first prompt is repeated.
    """
    first, second = ([f"{which}/{at}".encode() for at in range(40)] for which in "ab")
    alone = Workload("alone", 256, [
        Prompt(at_s, 40 * 256 + 100, 1, keys) for at_s, keys in ((0.0, first), (60.0, second), (120.0, first))
    ])  # fmt: skip
    model = Model(device_tokens=41 * 256, step_tokens=1 << 20)
    out = Engine(alone, "lru", model=model, host=Host(100, bytes_per_s=1e9)).run()
    whole = model.step_s + model.prefill_s(0, 40 * 256 + 100)
    load_s = 40 * 256 * model.bytes_per_token / 1e9
    assert load_s > whole
    assert out.ttft_s == pytest.approx([whole, whole, load_s])


def test_due_calls_run_in_the_order_of_their_times() -> None:
    """Due calls run at their times, in the order of these times.

    A call for an earlier time than the present runs at once.
    """
    clock, called = Clock(), list[tuple[str, float]]()
    note: Any = lambda name: lambda: called.append((name, clock.monotonic()))  # noqa: E731
    clock.at(2.0, note("b"))
    clock.at(1.0, note("a"))
    clock.at(3.0, note("c"))
    clock.go(2.5)
    clock.at(0.5, note("late"))
    clock.go(2.5)
    assert called == [("a", 1.0), ("b", 2.0), ("late", 2.5)]
    assert (clock.next_s, clock.monotonic()) == (3.0, 2.5)
    with pytest.raises(AssertionError, match="forwards"):
        clock.go(2.0)


def test_bytes_of_two_transfers_do_not_overlap() -> None:
    """The latencies of two transfers overlap, but their bytes do not."""
    link = Link(10.0, latency_s=1.0)
    assert [link.carry(20, 0.0), link.carry(20, 0.0), link.carry(20, 10.0)] == [3.0, 5.0, 13.0]
    assert link.moved == 60


def test_a_prompt_costs_the_same_in_parts() -> None:
    """The cost of a prompt does not depend on its division into steps. A longer prompt costs more per token."""
    model = Model()
    assert model.prefill_s(0, 700) + model.prefill_s(700, 1000) == pytest.approx(model.prefill_s(0, 1000))
    assert model.prefill_s(100_000, 101_000) > 2 * model.prefill_s(0, 1000)


def test_the_page_is_fresh() -> None:
    """The page has the numbers of the JSON file. `python -m benchmarks.replay --page` regenerates the page."""
    found = json.loads(report.RESULTS.read_text(encoding="utf-8"))
    assert report.RESULTS.with_suffix(".html").read_text(encoding="utf-8") == page.html(found)
    assert report.RESULTS.with_name("traces-agents.svg").read_text(encoding="utf-8") == page.picture(found)
