"""Trials of the scheduler side of tiers: which requests wait, how long they wait, and which leases they have."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from kvpipe.cache.policy import Sessions
from kvpipe.cache.policy.guard import RescuedPolicy
from kvpipe.connectors.vllm import scheduler_role
from kvpipe.connectors.vllm.trial.invariants import Watched
from kvpipe.connectors.vllm.trial.shapes import SHAPES, Shape
from kvpipe.connectors.vllm.trial.trial import Trial
from kvpipe.scheduler.fetches import Staging
from kvpipe.scheduler.gauges import totals
from kvpipe.statemachine import stage as m
from kvpipe.testing.held_tier import HeldTier
from kvpipe.tiers import first_hash
from kvpipe.tiers.base import Key

SHAPE = SHAPES["tier"]._replace(pool_slots=12)
ADD = ("add", 0, 199, 0, 3, 0, 0)
"""A request for all 200 tokens of document 0. These are one chunk, two blocks of a second chunk, and 8 more tokens."""


class Played:
    """A trial in which every request has the same prompt, unless a test gives another prompt."""

    def __init__(self, trial: Trial) -> None:
        """Run the prompt once, so that the tiers hold it, and then empty the memory."""
        self.trial, self.watched = trial, Watched(trial)
        self.run()
        self.forget()

    @property
    def staging(self) -> Staging:
        """Return the trial's staging."""
        assert self.trial.side.staging is not None
        return self.trial.side.staging

    def do(self, *moves: tuple[object, ...]) -> None:
        """Make moves, and check that no invariant breaks."""
        for move in moves:
            self.trial.do(move)
            assert not self.watched.broken

    def run(self) -> dict[str, int]:
        """Run one request to its end. Return the number of hit tokens so far, by origin."""
        self.do(ADD, ("drain",))
        self.watched.after_drain()
        assert not self.watched.broken
        return dict(self.trial.side.tracer.hit_tokens)

    def forget(self) -> None:
        """Empty kvpipe's memory and vLLM's own cache."""
        self.trial.side.catalog.reset()
        assert self.trial.scheduler.reset_prefix_cache()
        side = self.trial.side
        side.weighed(dict.fromkeys(range(len(self.trial.ranks)), (side.weights.next_question(), self.trial.weights)))

    @property
    def waiting(self) -> list[str]:
        """The states of the stages that belong to live requests."""
        stages = [tracked.stage for tracked in self.trial.side.requests.tracked.values()]
        return [stage.state.name for stage in stages if stage is not None]


@contextmanager
def in_play(shape: Shape = SHAPE) -> Iterator[Played]:
    """Yield a trial of `shape` whose tiers hold document 0 and whose memory is empty."""
    trial = Trial(shape, 2)
    for i in range(4):
        trial.documents[i] = [1 + (7 * i + j) % 50 for j in range(200)]
    try:
        yield Played(trial)
    finally:
        trial.close()


@pytest.mark.parametrize("name", ["tier", "two-tiers", "async-scheduler-tier", "tier-hybrid"])
def test_evicted_prompt_is_fetched_from_the_tier(name: str) -> None:
    """If memory holds a prompt no more, the prompt is fetched. Its tokens are counted as hits of the tier."""
    with in_play(SHAPES[name]._replace(pool_slots=24)) as played:
        before = played.run()
        assert before.pop("dict-0") >= 128
        assert before["memory"] == 0 or len(before) == 1


def test_fetched_window_is_the_beginning_of_a_chain() -> None:
    """Chunks before the window are not fetched. The policy treats the fetched chunks as the beginning of a chain."""
    with in_play(SHAPES["window"]._replace(tiers=1, pool_slots=24, policy="sessions")) as played:
        played.trial.documents[0] = [1 + j % 50 for j in range(250)]
        long = ("add", 0, 249, 0, 3, 0, 0)
        played.do(long, ("drain",))
        played.forget()
        played.do(long, ("drain",))
        assert played.trial.side.counters["chunks_fetched"]
        policy = played.trial.side.catalog._policy
        assert isinstance(policy, RescuedPolicy)
        assert isinstance(policy._one, Sessions)
        assert [chain.orphan for chain in policy._one._chains if chain is not None] == [False]


def test_request_does_not_wait_when_tiers_have_nothing() -> None:
    """If tiers have no chunk of a request, the request waits only for the lookup."""
    with in_play() as played:
        played.trial.tiers[0].values.clear()
        played.do(ADD, ("schedule",))
        assert played.waiting == [m.ASKING]
        played.do(("update",), ("schedule",))
        assert played.waiting == []
        assert played.trial.scheduler.running


def test_short_rest_is_not_fetched() -> None:
    """If memory lacks less than a chunk of a prompt, the rest is computed without a lookup in tiers."""
    with in_play() as played:
        played.run()
        lookups = played.trial.side.counters["tier_lookup"]
        played.run()
        assert played.trial.side.counters["tier_lookup"] == lookups


def test_requests_share_a_fetch() -> None:
    """Two requests for one prompt wait for the same fetch of each chunk."""
    with in_play() as played:
        played.do(("hold", True), ADD, ADD, ("schedule",), ("update",), ("hold", False))
        played.do(("schedule",), ("update",), ("schedule",), ("drain",))
        stored = len(played.trial.tiers[0].values)
        assert 0 < played.trial.side.counters["chunks_fetching"] <= stored


def _chunks(names: Iterable[str]) -> set[str]:
    """Return the names of a tier's chunks, without the names under which first hashes are stored."""
    return {name for name in names if Key.parse(name).chunk != first_hash.NAME}


def test_tier_with_a_listing_is_notified_of_stored_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tier that answers from a listing is notified of exactly the chunks that every rank has stored."""
    reported: list[str] = []

    def stored(_: HeldTier, keys: Sequence[Key]) -> None:
        reported.extend(key.text for key in keys)

    monkeypatch.setattr(HeldTier, "stored", stored, raising=False)
    with in_play(SHAPE._replace(ranks=2)) as played:
        values = played.trial.tiers[0].values
        assert sorted(reported) == sorted(_chunks(values))
        assert values
        values.clear()
        reported.clear()
        played.trial.tiers[0].trouble = "down"
        played.trial.excused |= {"tier_failed"}
        played.do(ADD, ("drain",))
        assert not reported


def test_shares_follow_a_smaller_pool() -> None:
    """Waiting requests and stores use a share of the slots. It shrinks if ranks report fewer slots later."""
    with in_play() as played:
        played.trial.side.catalog.reset()
        before, stores = played.staging._held_max, played.staging.stores._max
        played.trial.side.catalog.limit(4)
        assert (before, played.staging._held_max) == (9, 3)
        assert (stores, played.staging.stores._max) == (3, 1)


@pytest.mark.parametrize("when", [m.ASKING, m.FETCHING])
def test_waiting_request_uses_the_hit_in_memory_at_lookup_ms_max(when: str) -> None:
    """At `lookup_ms_max` a waiting request uses the hit in memory. Chunks that arrive later serve other requests."""
    with in_play() as played:
        if when == m.ASKING:
            played.do(("hold", True))
        played.do(ADD, ("schedule",), ("update",))
        if when == m.FETCHING:
            played.do(("schedule",), ("hold", True), ("update",), ("schedule",), ("update",))
        assert played.waiting == [when]
        played.do(("schedule",), ("update",))
        assert played.waiting == [when], "it waits"
        played.do(("late",), ("schedule",))
        assert played.waiting == []
        assert played.trial.side.counters["tier_lookup_late"] == 1
        assert played.trial.side.tracer.misses["tier_late"] == 1
        played.do(("drain",))


@pytest.mark.parametrize("move", [("abort", 0), ("reset", True, False)])
@pytest.mark.parametrize("steps", range(6))
def test_a_stage_ends_with_its_request(move: tuple[object, ...], steps: int) -> None:
    """In every state of a stage, its leases end if its request is aborted or the cache is reset."""
    with in_play() as played:
        played.do(ADD, *[("schedule",), ("update",)] * (steps // 2), *[("schedule",)] * (steps % 2), move, ("drain",))
        played.watched.after_drain()
        assert not played.watched.broken
        assert not played.staging.owners
        assert not played.staging.pending


@pytest.mark.parametrize("kind", ["forgets", "damages", "cuts", "down"])
def test_chunk_lost_after_the_lookup_is_computed(kind: str) -> None:
    """A chunk that was found but cannot be fetched is computed, and the reason is reported."""
    with in_play() as played:
        played.do(ADD, ("schedule",), ("update",), ("schedule",))
        played.trial.tiers[0].trouble = kind
        played.trial.excused |= {"tier_failed", "chunk_damaged"}
        played.do(("drain",))
        assert played.trial.side.tracer.misses["tier_lost"] == 1
        assert played.trial.side.counters["chunks_not_fetched"] > 0


def test_request_does_not_wait_for_a_tier_that_is_down() -> None:
    """While no tier can be asked, no request waits. The miss reason says that the tier is down."""
    with in_play() as played:
        played.trial.excused |= {"tier_failed"}
        played.trial.tiers[0].trouble = "down"
        for _ in range(4):
            played.run()
            played.forget()
        assert not played.staging.finder.usable
        lookups = played.trial.side.counters["tier_lookup"]
        played.run()
        assert played.trial.side.counters["tier_lookup"] == lookups
        assert played.trial.side.tracer.misses["tier_down"] == 5


def test_chunks_of_the_second_tier_are_stored_in_the_first() -> None:
    """Chunks that were fetched from the second tier are stored in the first tier."""
    with in_play(SHAPES["two-tiers"]._replace(pool_slots=24)) as played:
        near, far = played.trial.tiers
        assert _chunks(near.values) == _chunks(far.values)
        near.values.clear()
        assert played.run()["dict-1"] >= 128
        assert _chunks(near.values) == _chunks(far.values)


def test_waiting_requests_do_not_take_the_whole_pool() -> None:
    """Fetches leave slots for running requests."""
    with in_play(SHAPE._replace(pool_slots=4)) as played:
        played.do(*[("add", i, 199, 0, 3, 0, 0) for i in range(4)], ("drain",))
        played.forget()
        played.do(("hold", True), *[("add", i, 199, 0, 3, 0, 0) for i in range(4)], ("schedule",), ("update",))
        played.do(("hold", False), ("schedule",), ("update",), ("hold", True), ("schedule",))
        assert played.trial.side.catalog.leases + len(played.staging._fetching) <= 3
        played.do(("drain",))


def test_last_partial_chunk_of_a_request_is_stored() -> None:
    """The last chunk of a request is stored although it is not full, and is found."""
    with in_play() as played:
        tier: HeldTier = played.trial.tiers[0]
        found = played.run()["dict-0"]
        done = played.trial.over[-1]
        assert found == (len(done.sequence.prompt)) // 32 * 32
        assert len(tier.values) >= 2


def test_prompt_in_the_prefix_cache_of_vllm_waits_for_no_tier() -> None:
    """A prompt in vLLM's own prefix cache waits for no tier, although kvpipe's memory does not hold the prompt."""
    with in_play() as played:
        played.run()
        played.trial.side.catalog.reset()
        lookups = played.trial.side.counters["tier_lookup"]
        played.run()
        assert played.trial.side.counters["tier_lookup"] == lookups


def test_fetches_wait_for_lanes() -> None:
    """Ranks have at most one tier order per lane. Chunks of an aborted request that wait for a lane are not fetched."""
    shape = SHAPE._replace(pool_slots=16, blocks=40)
    with in_play(shape) as played:
        played.staging._fetches_max, played.staging._again_s = [1], float("inf")
        for i in range(3):
            played.do(("add", i, 199, 0, 3, 0, 0))
        played.do(("drain",))
        played.forget()
        before = played.trial.side.counters["chunks_fetching"]
        for i in range(3):
            played.do(("add", i, 199, 0, 3, 0, 0))
        played.do(("schedule",), ("update",), ("hold", True), ("schedule",), ("update",), ("schedule",), ("update",))
        assert played.trial.side.counters["chunks_fetching"] == before + 1
        assert played.waiting == [m.FETCHING] * 3
        played.do(("late",), ("schedule",))
        assert played.waiting == [m.FETCHING] * 2, "the engine has not asked for these again"
        assert played.trial.side.counters["chunks_fetching"] == before + 1
        played.do(("hold", False), ("drain",))
        assert played.trial.side.counters["chunks_fetching"] == before + 5, "all but one"


def test_failed_plan_loses_no_tier_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planning orders raises half way. Planned orders are sent. The request continues without the other chunks."""
    with in_play() as played:
        played.trial.excused |= {"fetch_not_planned", "store_not_planned"}
        reserve = played.staging._reserve
        calls = 0

        def failing(*args: object) -> object:
            nonlocal calls
            calls += 1
            if calls > 1:
                raise RuntimeError("broken")
            return reserve(*args)  # type: ignore[arg-type]

        with monkeypatch.context() as patch:
            patch.setattr(played.staging, "_reserve", failing)
            played.do(ADD, ("drain",))
        assert calls == 2
        assert played.trial.side.counters["fetch_not_planned"] == 1
        played.watched.after_drain()
        assert not played.watched.broken


def test_a_rank_without_tiers() -> None:
    """A rank without tiers reports its orders as failed, so that no request waits for ever."""
    with in_play(SHAPES["two-tiers"]._replace(pool_slots=24)) as played:
        worker = played.trial.ranks[1].connector.worker  # type: ignore[attr-defined]
        carrier, worker.carrier = worker.carrier, None
        played.trial.excused |= {"orders_without_tiers"}
        played.run()
        assert played.trial.side.counters["chunks_not_fetched"] > 0
        worker.carrier = carrier


def test_tiers_on_some_ranks_only() -> None:
    """Tiers are not used until every rank has reported what its bytes depend on."""
    trial = Trial(SHAPES["two-tiers"], 2)
    try:
        assert trial.side.staging is not None
        trial.side.staging.space.base = ""
        assert trial.kvpipe is not None
        first = trial.kvpipe.scheduler_role._met.pop(0)
        trial.kvpipe.scheduler_role._met.clear()
        trial.kvpipe.scheduler_role.meet([first])
        assert not trial.side.staging.space.name
        assert trial.kvpipe.counters["tiers_not_on_all_ranks"] == 1
    finally:
        trial.close()


def test_reason_why_other_layouts_share_nothing_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason that binds chunks to one layout is reported once. The reason's gauge is 1 while the reason applies."""
    noted = list[dict[str, Any]]()
    monkeypatch.setattr(scheduler_role, "info", lambda name, **fields: noted.append({"name": name, **fields}))
    trial = Trial(SHAPES["two-tiers"], 2)
    try:
        assert trial.kvpipe is not None
        assert [(one["name"], one["why"]) for one in noted] == [("tiers_of_one_layout", "caches")]
        assert totals(trial.side)["layout_bound"] == {"caches": 1.0}
        met = list(trial.kvpipe.scheduler_role._met.values())
        for weights, bound in (("m", {"caches": 0.0, "weights": 1.0}), ("m=s", {"caches": 0.0, "weights": 0.0})):
            for _ in range(2):
                trial.kvpipe.scheduler_role.meet([one._replace(common="c", weights=weights) for one in met])
                assert totals(trial.side)["layout_bound"] == bound
        assert [one["why"] for one in noted] == ["caches", "weights"]
    finally:
        trial.close()


def test_a_producer_stores_chunks_of_adapters() -> None:
    """Chunks of a LoRA adapter are stored, although no earlier request has used the adapter in a lookup."""
    with in_play() as played:
        played.trial.side.switches.loads = False
        before = len(played.trial.tiers[0].values)
        played.do(("add", 1, 199, 0, 3, 0, 1), ("drain",))
        assert len(played.trial.tiers[0].values) > before


def test_a_reset_before_the_weights_are_known() -> None:
    """Chunks from before a reset are not found after the reset, even if the weights were unknown at the reset."""
    with in_play() as played:
        played.trial.tiers[0].values, kept = dict(played.trial.tiers[0].values), played.trial.tiers[0].values
        space = played.staging.space
        base, space.base = space.base, ""
        played.do(("reset", True, False))
        assert not space.name
        space.base = base
        assert space.name not in {"", base}
        hits = played.run()
        assert "dict-0" not in hits
        assert played.trial.tiers[0].values.keys() > kept.keys()


def test_offers_keep_no_engine_busy_when_stores_are_never_reported() -> None:
    """Ranks have as many stores as allowed, and none ends. No step is made for chunks that wait to be stored."""
    with in_play() as played:
        stores, place = played.staging.stores, (0, "chunk", b"key")
        (queue,) = stores._queues
        assert not queue.under_way
        stores._offers[place] = SimpleNamespace(waits=False)  # type: ignore[index, assignment]
        queue.put(place, first=False)  # type: ignore[arg-type]
        assert bool(stores.pending)
        queue.under_way = dict.fromkeys(range(stores._max), "owner")  # type: ignore[arg-type]
        assert not bool(stores.pending)
        queue.remove(place)  # type: ignore[arg-type]
        stores._offers.clear()
        queue.under_way = {}
