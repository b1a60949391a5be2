"""KV events of chunks in tiers, in trials of vLLM's real scheduler with a router that receives them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from kvpipe.connectors.vllm.trial.invariants import Watched
from kvpipe.connectors.vllm.trial.shapes import SHAPES, Shape
from kvpipe.connectors.vllm.trial.trial import Trial
from kvpipe.scheduler import tier_blocks
from kvpipe.scheduler.stages import WantedPrompt
from kvpipe.scheduler.tier_blocks import TierBlocks
from kvpipe.testing.held_tier import DictSpec
from kvpipe.tiers.base import Key
from kvpipe.tiers.finder import TierLookup
from kvpipe.tiers.prefix_keys import PrefixKeys

if TYPE_CHECKING:
    from kvpipe.connectors.vllm.trial.router import Router
    from kvpipe.tiers.guard import MadeTier

SHAPE = SHAPES["tier"]._replace(pool_slots=12, ranks=2)
FIRST, SECOND = ("add", 0, 199, 0, 3, 0, 0), ("add", 1, 199, 0, 3, 0, 0)
"""Requests for documents of 200 tokens, which are a whole chunk and the beginning of a second chunk."""


class Routed:
    """A trial whose router receives the events of its tiers. No invariant may break."""

    def __init__(self, trial: Trial, only: str = "") -> None:
        """Start without requests. If `only` is not "", it names the only invariant that is checked."""
        self.trial, self.watched = trial, Watched(trial, only)
        assert trial.router is not None
        self.router: Router = trial.router

    def do(self, *moves: tuple[object, ...]) -> None:
        """Make moves."""
        for move in moves:
            self.trial.do(move)
            assert not self.watched.broken

    def run(self, *requests: tuple[object, ...]) -> None:
        """Run requests and their stores to their ends."""
        for one in requests:
            self.do(one, ("drain",))

    def hold_stores(self, request: tuple[object, ...]) -> None:
        """Run a request to its end, and hold its stores open."""
        self.do(request, ("step", 1), ("hold", True))
        for _ in range(12):
            self.do(("step", 0), ("tick", 4, 4))
        assert not self.trial.live
        assert self.trial.tiers[0].waiting >= SHAPE.ranks

    def forget(self) -> None:
        """Remove all chunks and blocks from memory and from vLLM's own cache, but not from the tiers."""
        catalog = self.trial.side.catalog
        for chunk in {one for group in range(len(self.trial.shape.windows)) for one in catalog.index(group).values()}:
            catalog._drop(chunk, "evicted")
        assert self.trial.scheduler.reset_prefix_cache()

    def believed(self, tier: int = 0) -> set[bytes]:
        """Return the blocks that the router expects in a tier."""
        events = self.trial.kvpipe.scheduler_role.events
        assert events is not None
        self.router.apply(self.trial.scheduler.kv_cache_manager.take_events())
        self.router.apply(events.take())
        assert self.router.problems == []
        return set(self.router.index.get((f"STORAGE/dict-{tier}", 0), ()))

    def stored(self, tier: int = 0) -> set[bytes]:
        """Return the chunks of which a tier has all parts, in the namespace that the engine uses now."""
        staging = self.trial.side.staging
        assert staging is not None
        names = [name for name in self.trial.tiers[tier].values if name.startswith(staging.space.name)]
        chunks = [bytes.fromhex(name.split("-")[1]) for name in names if "-g0-" in name]
        return {one for one in chunks if chunks.count(one) == staging.finder.parts(0)}

    @property
    def known(self) -> TierBlocks:
        """The chunks of each tier that the engine believes the router to know."""
        assert self.trial.side.staging is not None
        blocks = self.trial.side.staging.tier_blocks
        assert blocks is not None
        return blocks

    def count(self, name: str) -> int:
        """Return a counter of the scheduler side."""
        return self.trial.side.counters[name]  # type: ignore[index]


@contextmanager
def routed(shape: Shape = SHAPE, only: str = "") -> Iterator[Routed]:
    """Yield a trial of `shape` with a router."""
    trial = Trial(shape, 2)
    for i in range(4):
        trial.documents[i] = [1 + (7 * i + j) % 50 for j in range(200)]
    try:
        yield Routed(trial, only)
    finally:
        trial.close()


def test_router_learns_each_chunk_of_a_tier_once() -> None:
    """A chunk is announced once, even if it is stored again or fetched."""
    with routed() as played:
        played.run(FIRST, SECOND)
        assert played.believed() == played.stored() != set()
        announced = played.count("tier_blocks_announced")
        assert announced == len(played.stored())
        played.forget()
        played.run(FIRST)
        assert played.count("chunks_fetched")
        assert played.count("tier_blocks_announced") == announced
        assert played.believed() == played.stored()


def test_a_chunk_is_announced_when_the_last_rank_has_stored_it() -> None:
    """While any rank's part is missing, a router does not expect the chunk."""
    with routed() as played:
        played.hold_stores(FIRST)
        assert played.believed() == set()
        played.do(("hold", False), ("drain",))
        assert played.believed() == played.stored() != set()


def test_a_lost_value_is_withdrawn_at_the_next_lookup() -> None:
    """The tier has dropped one rank's part of every chunk.

    A lookup asks for no chunk after a missing chunk, so only the first missing chunk is withdrawn.
    """
    with routed() as played:
        played.run(FIRST)
        held = played.believed()
        for name in [name for name in played.trial.tiers[0].values if "-r0of" in name]:
            del played.trial.tiers[0].values[name]
        played.forget()
        assert played.believed() == held, "no event tells the engine"
        played.run(FIRST)
        assert played.count("tier_blocks_withdrawn") == 1
        assert played.believed() == played.stored() == held, "both chunks were stored again"
        assert played.count("tier_blocks_announced") == len(held) + 1


def test_a_chunk_stays_announced_when_a_fetch_fails() -> None:
    """A fetch also fails if a breaker is open or all lanes are in use.

    So only a lookup can show that a chunk is lost.
    """
    with routed() as played:
        played.run(FIRST)
        held = played.believed()
        played.forget()
        played.do(("trouble", 0, 3), FIRST, ("step", 0), ("step", 0), ("step", 0))
        assert played.count("chunks_not_fetched")
        assert played.believed() == held
        assert played.count("tier_blocks_withdrawn") == 0
        played.do(("trouble", 0, 0), ("drain",))
        assert played.believed() == played.stored() == held, "it was computed and stored again"


def test_a_reset_withdraws_everything_and_announces_no_store_in_flight() -> None:
    """After a reset the engine finds none of its earlier chunks, even if their stores end after the reset."""
    with routed() as played:
        played.run(FIRST)
        assert played.believed()
        played.hold_stores(SECOND)
        played.do(("reset", True, False))
        assert played.believed() == set()
        played.do(("hold", False), ("drain",))
        assert played.believed() == played.stored()
        assert len(played.stored()) * SHAPE.ranks < len(played.trial.tiers[0].values)


def test_routers_that_forget_all_blocks_learn_those_of_tiers_again() -> None:
    """vLLM's event for a reset of its own cache names no medium, so routers forget blocks of all media."""
    with routed() as played:
        played.run(FIRST)
        held = played.believed()
        assert played.trial.scheduler.reset_prefix_cache()
        played.router.index.clear()
        assert played.believed() == held != set()


def test_the_oldest_chunk_is_withdrawn_when_too_many_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table of known chunks is bounded. A withdrawn chunk is still in the tier, so lookups can find it."""
    with routed(only="tiers_are_announced_truly") as played:
        played.run(FIRST)
        first = played.believed()
        monkeypatch.setattr(tier_blocks, "TOKENS_MAX", played.known._shares.amount)
        played.run(SECOND)
        assert played.believed() != first
        assert len(played.believed()) < len(played.stored())
        assert played.known._shares.amount <= tier_blocks.TOKENS_MAX
        assert played.count("tier_blocks_withdrawn") == len(played.stored()) - len(played.believed())


def test_a_chunk_that_another_engine_stored_is_announced_when_it_was_fetched() -> None:
    """A chunk that another engine stored is announced when this engine fetches it.

    So after a restart, a router learns the chunks that are used.
    """
    with routed() as played:
        played.run(FIRST)
        held = played.believed()
        played.known.reset()
        assert played.believed() == set()
        played.forget()
        played.run(FIRST)
        assert set() < played.believed() <= held


def test_a_miss_does_not_withdraw_a_chunk_that_was_stored_meanwhile() -> None:
    """A lookup begins before a store has ended, and the lookup's miss arrives after the store.

    The stored chunk stays announced.
    """
    with routed() as played:
        played.run(FIRST)
        staging, held = played.trial.side.staging, played.believed()
        assert staging is not None
        known = played.known.known[0]
        for older, left in ((True, held), (False, set())):
            for group, name in [*known]:
                prompt = played.trial.over[-1]
                lookup = staging._lookup(
                    WantedPrompt(played.watched.request_of(prompt), staging._context.prefixes, None), 0
                )
                lookup.misses = [(0, (group, name))]
                lookup.number -= older * played.known._number
                played.known.missed(lookup)
            assert played.believed() == left


def test_noticed_chunks_are_withdrawn_together_and_a_few_in_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost chunk is withdrawn once, although each of its parts is reported as lost."""
    with routed() as played:
        played.run(FIRST, SECOND)
        known, staging, sizes = played.known, played.trial.side.staging, list[int]()
        assert staging is not None
        names = [*known.known[0]]
        assert len(names) > 2
        monkeypatch.setattr(tier_blocks, "NOTICES_PER_STEP_MAX", 2, raising=False)
        monkeypatch.setattr(known._published, "gone", lambda _tier, _group, blocks: sizes.append(len(blocks)))
        for group, chunk in names:
            for rank in range(SHAPE.ranks):
                known._notice(0, Key(staging.space.name, chunk, group, rank, SHAPE.ranks))
        assert len(known._noticed) == len(names)
        known.plan_step()
        assert sizes == [2]
        while known._noticed:
            known.plan_step()
        assert sum(sizes) == len(names)


def test_a_reset_ends_all_stages_when_the_withdrawal_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a stage did not end, its request would load KV from before the reset."""

    def boom() -> None:
        raise RuntimeError("boom")

    with routed() as played:
        played.run(FIRST)
        played.forget()
        staging, request = played.trial.side.staging, played.watched.request_of(played.trial.over[-1])
        assert staging is not None
        stage = staging.ahead(request, staging._context.prefixes, None)
        assert stage is not None
        monkeypatch.setattr(played.known, "reset", boom)
        with pytest.raises(RuntimeError, match="boom"):
            staging.reset()
        assert stage.state.final


def test_an_engine_without_routers_does_no_work_for_them() -> None:
    """No table of known chunks is kept, and no misses are recorded."""
    trial = Trial(SHAPE._replace(events=False), 2)
    try:
        trial.do(FIRST)
        trial.do(("drain",))
        staging = trial.side.staging
        assert staging is not None
        assert staging.tier_blocks is None
        assert trial.side.counters["chunks_stored"]
        assert trial.side.counters["tier_blocks_announced"] == 0
    finally:
        trial.close()


def test_no_chunk_of_a_tier_is_announced_when_its_events_are_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """`announce: never` is for routers that treat blocks in a tier as blocks in memory."""

    def made(trial: Trial, *, writes: bool) -> list[MadeTier]:  # noqa: ARG001
        return [(tier.name, DictSpec.model_validate({"announce": "never"}), tier) for tier in trial.tiers]

    monkeypatch.setattr(Trial, "_made_tiers", made)
    with routed(only="tiers_are_announced_truly") as played:
        played.run(FIRST)
        played.forget()
        played.run(FIRST)
        assert played.count("chunks_fetched")
        assert played.count("tier_blocks_announced") == 0
        lookup = TierLookup(PrefixKeys([], ()), (), space="", seconds_max=1.0)
        assert played.known.watch(lookup).misses is None
