"""Chunks of announced requests are in memory in time, in trials of vLLM's real scheduler and in virtual time."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from kvpipe.cache.tenants import ANYBODY, Tenant
from kvpipe.connectors.vllm.trial.hints import HINTS
from kvpipe.connectors.vllm.trial.shapes import SHAPES, Shape
from kvpipe.features import announced as a
from kvpipe.features.announced import Announcement, Announcements, KnownPrompt
from kvpipe.scheduler.stages import AheadStage
from kvpipe.trace import events as e
from kvpipe.trace.log import Counters
from tests.trials.test_fetches import ADD, SHAPE, Played, in_play

ROOMY = SHAPE._replace(pool_slots=32, hints=True)
STEPS: tuple[tuple[object, ...], ...] = (("schedule",), ("update",))
OTHER = ("add", 3, 60, 0, 3, 0, 0)
RETAIN, RESUME, DEMOTE = range(3)
PAUSE_S = 2000


class Clock:
    """A catalog's clock that does not advance."""

    def __init__(self, played: Played) -> None:
        """Start at a late time."""
        self.now_s = 5000.0
        catalog: Any = played.trial.side.catalog
        catalog._clock = lambda: self.now_s


@contextmanager
def announcing(shape: Shape = ROOMY, pause_s: int = PAUSE_S) -> Iterator[tuple[Played, Clock]]:
    """Yield a trial in which the prompt's next request is announced, but the prompt's chunks are not in memory."""
    with in_play(shape) as played:
        clock = Clock(played)
        played.do(("hint", RESUME, pause_s), ADD, ("drain",))
        assert played.trial.side.counters["resumes_announced"] == 1
        played.forget()
        yield played, clock


def steps(played: Played) -> None:
    """Let another request make the engine step for a while."""
    played.do(OTHER, *STEPS, ("drain",))


def over(played: Played, why: str) -> int:
    """Return the number of announcements that have ended for this reason."""
    return played.trial.side.counters.totals().get(f"resumes_over.{why}", 0)


@pytest.mark.parametrize("name", ["tier", "two-tiers", "async-scheduler-tier", "tier-hybrid", "pipeline-2"])
@pytest.mark.parametrize("policy", ["lru", "s3fifo", "sessions"])
def test_announced_prompt_is_in_memory_before_its_request_arrives(name: str, policy: str) -> None:
    """The announced request does not wait for a tier. No chunk is fetched before the announced time is near."""
    with announcing(SHAPES[name]._replace(pool_slots=32, hints=True, policy=policy)) as (played, clock):
        counters = played.trial.side.counters
        clock.now_s += PAUSE_S * a.TURNS[0] - 1
        steps(played)
        assert counters["chunks_prefetched"] == 0
        clock.now_s += 2
        steps(played)
        brought = counters["chunks_prefetched"]
        assert brought > 0
        assert not played.staging.owners
        before, lookups = dict(played.trial.side.tracer.hit_tokens), counters["tier_lookup"]
        after = played.run()
        assert after["memory"] - before["memory"] >= 128
        assert all(after.get(tier, 0) == before.get(tier, 0) for tier in played.staging.names)
        assert counters["tier_lookup"] <= lookups + 1  # at most one lookup more, for the chunk in which the prompt ends
        assert counters["prefetch_used"] == brought
        assert over(played, "came") == 1
        assert not played.trial.side.prefetching.announced.prompts


@pytest.mark.parametrize("policy", ["lru", "sessions"])
def test_announced_chunks_use_the_room_of_their_own_quota(policy: str) -> None:
    """Another quota has little room, as its prefetched chunks were never used. The prompt's quota has all its room."""
    with announcing(ROOMY._replace(quotas=True, policy=policy)) as (played, clock):
        side: Any = played.trial.side
        counters, named = side.counters, side.catalog.tenants.named
        side.catalog.ahead.of_account(named("2", None))._wasted = 100.0
        clock.now_s += PAUSE_S
        steps(played)
        brought = counters["chunks_prefetched"]
        assert brought > 1
        assert {chunk.tenant.salt for chunk in side.catalog.ahead.chunks} == {""}
        assert side.catalog.room_ahead(named("2", None)) <= 1
        played.run()
        assert counters["prefetch_used"] == brought
        assert over(played, "came") == 1


def test_nothing_is_fetched_at_the_announced_time_after_the_request_has_arrived() -> None:
    """If the announced request arrives early, nothing is fetched at the announced time."""
    with announcing() as (played, clock):
        played.run()
        assert over(played, "early") == 1
        fetched = played.trial.side.counters["chunks_fetched"]
        assert fetched > 0
        played.forget()
        clock.now_s += 2 * PAUSE_S
        steps(played)
        assert played.trial.side.counters["chunks_fetched"] == fetched


def test_each_chunk_is_fetched_once_when_the_request_arrives_during_the_prefetch() -> None:
    """If the announced request arrives during the prefetch, each chunk is fetched once, and no room stays reserved."""
    with announcing() as (played, clock):
        clock.now_s += PAUSE_S
        played.do(("hold", True), OTHER, *STEPS * 2)
        (ahead,) = (stage for stage in played.staging._stages if stage.ahead)
        assert isinstance(ahead, AheadStage)
        assert ahead.announced
        played.do(ADD, ("schedule",))
        assert ahead not in played.staging._stages
        assert over(played, "came") == 1
        played.do(("hold", False), ("update",), ("drain",))
        counters = played.trial.side.counters
        assert counters["chunks_fetching"] <= len(played.trial.tiers[0].values)
        assert counters["chunks_prefetched"] == 0
        assert not played.trial.side.prefetching.has_work()


def test_evicted_announced_chunks_are_fetched_again() -> None:
    """Chunks that are evicted after the fetch are fetched again in the prompt's next turn, until its last turn."""
    with announcing() as (played, clock):
        counters, begin_s, brought = played.trial.side.counters, clock.now_s, 0
        for share in a.TURNS:
            clock.now_s = begin_s + share * PAUSE_S + 1
            steps(played)
            assert counters["chunks_prefetched"] > brought
            brought = counters["chunks_prefetched"]
            steps(played)
            assert counters["chunks_prefetched"] == brought, "its turn was over"
            played.forget()
        assert over(played, "in_vain") == 1
        clock.now_s += PAUSE_S
        steps(played)
        assert counters["chunks_prefetched"] == brought


def test_announced_chunks_are_evicted_last_without_hints() -> None:
    """A policy without hints does not know that the announced chunks in memory are needed soon.

    So kvpipe refreshes these chunks, and other chunks are evicted before them.
    """
    with in_play(ROOMY) as played:
        clock, catalog = Clock(played), played.trial.side.catalog
        played.do(("hint", RESUME, PAUSE_S), ADD, ("drain",))
        mine = {chunk.slot for chunk in catalog.chunks()}
        steps(played)
        clock.now_s += PAUSE_S
        played.do(OTHER, ("schedule",))
        assert {chunk.slot for chunk in catalog.ahead.chunks} == mine
        policy: Any = catalog._policy
        assert {chunk.slot for chunk in list(policy._order)[-len(mine) :]} == mine
        played.do(("drain",))
        assert played.trial.side.counters["chunks_prefetched"] == 0


@pytest.mark.parametrize("how", ["reset", "weights"])
def test_reset_forgets_announced_prompts(how: str) -> None:
    """No chunk from before the reset is found, neither in memory nor in tiers."""
    with announcing() as (played, clock):
        played.do(("reset", True, False) if how == "reset" else ("weights", 1))
        steps(played)
        assert over(played, "reset") == 1
        clock.now_s += PAUSE_S
        steps(played)
        assert played.trial.side.counters["chunks_prefetched"] == 0


def test_announced_prompts_have_no_turns_while_loads_are_off() -> None:
    """While loads are switched off, announcements do not make the engine step. After that the turns continue."""
    with announcing() as (played, clock):
        side: Any = played.trial.side
        clock.now_s += PAUSE_S
        side.switches.bypass = True
        steps(played)
        assert not side.pending
        assert side.counters["chunks_prefetched"] == 0
        side.switches.bypass = False
        assert side.pending
        steps(played)
        assert side.counters["chunks_prefetched"] > 0


def test_engine_that_becomes_idle_fetches_prompts_that_are_announced_for_soon() -> None:
    """An idle engine makes no steps until a request arrives.

    So the engine fetches prompts that are announced for soon before it stops making steps.
    """
    with announcing(pause_s=int(a.IDLE_S)) as (played, _):
        side = played.trial.side
        side.prefetching.announced.clear()
        played.do(("hint", RESUME, int(a.IDLE_S)), ADD, ("schedule",), ("update",))
        played.do(*STEPS * 4)
        while played.trial.live:
            played.do(*STEPS)
        assert over(played, "in_vain") == 0
        played.do(("drain",))
        assert not side.pending
        (one,) = side.prefetching.announced.prompts.values()
        assert one.turns == 1
    with announcing(pause_s=int(a.IDLE_S) + 1) as (played, _):
        (one,) = played.trial.side.prefetching.announced.prompts.values()
        assert one.turns == 0


def test_request_does_not_wait_for_an_announced_prefetch() -> None:
    """A request that arrives during the prefetch is scheduled in the same pass, even if the tier does not answer."""
    with announcing() as (played, clock):
        clock.now_s += PAUSE_S
        played.do(("hold", True), OTHER, *STEPS * 2, ("add", 3, 20, 0, 3, 0, 0), ("schedule",))
        assert played.trial.scheduler.running
        assert played.trial.side.prefetching._due
        played.do(("hold", False), ("update",), ("drain",))
        assert played.trial.side.counters["chunks_prefetched"] > 0


def test_prompts_of_operators_are_fetched_before_announced_prompts() -> None:
    """A prompt that an operator warms is fetched before announced prompts whose fetch has not begun."""
    with announcing() as (played, clock):
        side = played.trial.side
        prefetch = side.prefetching.queue(KnownPrompt((), 0))
        clock.now_s += PAUSE_S
        played.do(OTHER, ("schedule",))
        assert prefetch.over
        assert side.prefetching.announced.has_turn(clock.now_s, idle=False)
        played.do(("drain",))
        assert side.counters["chunks_prefetched"] > 0


def test_announced_chunks_take_no_more_than_their_room() -> None:
    """The room is enough only for the first chunks of the prompt.

    These chunks are fetched first, because they are useful without the later chunks.
    """
    with announcing(ROOMY._replace(pool_slots=12)) as (played, clock):
        side = played.trial.side
        part: Any = side.catalog.ahead.of_account(ANYBODY)
        part._used, part._wasted = 0.0, 100.0
        assert side.catalog.room_ahead(ANYBODY) == 1
        clock.now_s += PAUSE_S
        steps(played)
        assert side.counters["chunks_prefetched"] == 1
        one = next(iter(side.catalog.ahead.chunks))
        assert one.before == b""
        steps(played)
        assert side.counters["chunks_prefetched"] == 1


def test_an_engine_without_hints_remembers_and_asks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """In an engine without hints, announcements cost only one read of an empty dict per request."""

    def called(*_: object, **__: object) -> None:
        raise AssertionError

    for name in ("add", "came", "has_turn", "take"):
        monkeypatch.setattr(Announcements, name, called)
    with in_play(ROOMY) as played:
        played.run()
        assert not played.trial.side.counters["resumes_announced"]


def test_hints_other_than_resume_are_ignored_without_a_policy_for_hints() -> None:
    """With tiers, `kv.resume` is used to fetch the prompt, and other hints are ignored.

    Without tiers, all hints are ignored.
    """
    with announcing() as (played, _):
        for which in (RETAIN, DEMOTE):
            played.do(("hint", which, 7), ADD, ("drain",))
        counted = played.trial.side.counters.totals()
        assert counted["hints_ignored.policy"] == 2
        assert counted["resumes_announced"] == 1
        assert "hints_applied" not in counted
        assert HINTS[RESUME](7)[1] == {"resume": {"after_seconds": 7}}
    with in_play(ROOMY._replace(tiers=0)) as played:
        played.do(("hint", RESUME, 7), ADD, ("drain",))
        assert played.trial.side.counters.totals()["hints_ignored.policy"] == 1
        assert not played.trial.side.counters["resumes_announced"]


def test_aborted_request_announces_nothing() -> None:
    """An announcement by an aborted request, or by a request shorter than a block, causes no fetch and no error."""
    with in_play(ROOMY) as played:
        clock = Clock(played)
        played.do(("hint", RESUME, 9), ("add", 2, 5, 0, 3, 0, 0), ("drain",))
        assert not played.trial.side.prefetching.announced.prompts
        played.do(("hint", RESUME, PAUSE_S), ("add", 1, 199, 0, 9, 0, 0), *STEPS, ("abort", 0), ("drain",))
        clock.now_s += PAUSE_S
        steps(played)
        assert not played.trial.side.pending


def test_trace_shows_the_prefetch_of_an_announced_request() -> None:
    """The trace has the prefetch with the announced request's name, and the time until the announced time."""
    with announcing() as (played, clock):
        put: list[e.Event] = []
        side: Any = played.trial.side
        trace = SimpleNamespace(lifecycle=True, of=lambda request, _: (0, -1, request, 0, 1), put=put.append)
        side.prefetching._context = dataclasses.replace(side.context, trace=trace)
        clock.now_s += PAUSE_S - 50
        steps(played)
        (event,) = put
        assert isinstance(event, e.ResumePrefetched)
        assert event.tokens >= 128
        assert (event.left_ms, event.turn) == (50_000, 1)
        assert event.request.startswith("r")


# ---- remembered announcements ---------------------------------------------------------------------------------------


def remembered(
    name: str, pause_s: float, hashes: int = 4, now_s: float = 0.0, tenant: Tenant = ANYBODY
) -> Announcement:
    """Return an announcement of a new prompt."""
    keys = [f"{name}/{at}".encode() for at in range(hashes)]
    return Announcement(KnownPrompt(keys, 16 * hashes), name, None, hashes - 2, now_s, pause_s, tenant)


def test_prompt_with_the_latest_announced_time_is_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remembered prompts and hashes are limited. The prompt with the latest announced time is forgotten first."""
    monkeypatch.setattr(a, "ANNOUNCED_MAX", 3)
    counters = Counters()
    all_ = Announcements(counters, hashes_max=20)
    for name, pause_s in (("a", 30), ("b", 90), ("c", 60), ("d", 10)):
        all_.add(remembered(name, pause_s))
    assert {one.request_id for one in all_.prompts.values()} == {"a", "c", "d"}
    all_.add(remembered("e", 20, hashes=16))
    assert {one.request_id for one in all_.prompts.values()} == {"e", "d"}
    all_.add(remembered("f", 1, hashes=30))
    assert not all_.prompts
    assert counters.totals()["resumes_over.too_many"] == 5 + 1
    assert (all_._hashes.amount, all_.has_turn(1e9, idle=True)) == (0, False)


def test_one_prompt_is_remembered_once() -> None:
    """A second announcement of a prompt replaces the first announcement."""
    counters = Counters()
    all_ = Announcements(counters)
    all_.add(remembered("a", 30))
    all_.add(remembered("a", 300))
    (one,) = all_.prompts.values()
    assert one.at_s == 300
    assert counters.totals()["resumes_over.replaced"] == 1


def test_announced_prompts_have_their_turns_in_the_order_of_their_times() -> None:
    """Announcements have their turns in the order of their times. Announcements with a time in the past come last."""
    all_ = Announcements(Counters())
    for name, pause_s in (("late", 50), ("soon", 110), ("then", 111), ("long", 1000)):
        all_.add(remembered(name, pause_s))
    order = []
    while (one := all_.take(100.0, idle=False)) is not None:
        order.append(one.request_id)
    assert order == ["soon", "then", "late"]
    assert not all_.has_turn(100.0, idle=False)


@pytest.mark.parametrize("pause_s", [0.0, 1.0, 10.0, 1000.0])
def test_announcement_has_its_turns_and_is_then_forgotten(pause_s: float) -> None:
    """An announcement has `turns` turns, the first before the announced time, and is forgotten after the last turn."""
    all_ = Announcements(Counters())
    all_.add(remembered("a", pause_s, now_s=7.0))
    turns, now_s = list[float](), 7.0
    while all_.prompts:
        if all_.take(now_s, idle=False):
            turns.append(now_s - 7.0)
        now_s += 0.25
        assert now_s < 10_000
    assert len(turns) == (len(a.TURNS) if pause_s else 1)
    assert turns[0] <= max(0.0, min(pause_s * a.TURNS[0], pause_s - a.LEAD_S_MIN)) + 0.25
    assert all(later - earlier >= a.BETWEEN_S_MIN for earlier, later in itertools.pairwise(turns))
    assert turns[-1] <= max(pause_s * a.TURNS[-1], a.BETWEEN_S_MIN * len(turns)) + 0.25


def test_announced_request_has_arrived_when_a_request_begins_with_the_whole_prompt() -> None:
    """Only a request that begins with the whole announced prompt counts, not a request that shares its beginning."""
    all_ = Announcements(Counters())
    one = remembered("a", 30)
    all_.add(one)
    keys = list(one.asked.block_hashes)
    assert all_.came(keys[:2]) == []
    assert all_.came([*keys[:2], b"other", b"more"]) == []
    assert all_.came([*keys[:3], b"another answer"]) == [one]
    assert all_.came(keys) == []
