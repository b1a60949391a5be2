"""Answers that no prompt goes on with are evicted first and not stored; all others are kept as ever."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any, Final

import pytest

from benchmarks.replay.answers import World, compare
from kvpipe.cache.catalog import Chunk
from kvpipe.cache.hints import Action
from kvpipe.cache.policy import Lru
from kvpipe.cache.quotas import Accounts, SharedCatalog
from kvpipe.connectors.vllm.trial.scheduler_world import SchedulerWorld
from kvpipe.quota_spec import parse_quotas
from kvpipe.scheduler.answers import KEPT_SHARE, KINDS_MAX, PLACES_MAX, SEEN_MAX, STORED_SHARE, AnswerKind
from kvpipe.scheduler.hints import Wish
from kvpipe.scheduler.pace import Pace
from kvpipe.scheduler.stores import Storing
from kvpipe.tiers.namespace import Namespace
from kvpipe.trace.log import Counters

CHUNK: Final = 4
"""Units per chunk."""
PROMPT: Final = CHUNK + 2
STOP: Final = 3 * CHUNK + 1
"""Units of a prompt, and of all of its request: two chunks and one that is begun hold nothing but the answer."""
ANSWERS: Final = 2
"""Chunks that hold nothing else."""
SEEN_MIN: Final = int(3 / KEPT_SHARE)
"""So many answers in a row that were cut are enough."""


class Chat:
    """Conversations with one template on a scheduler side."""

    def __init__(self, *, slots: int = 4096, **world: Any) -> None:
        """Nobody has reported anything."""
        self.world = SchedulerWorld(chunk_units=CHUNK, slots=slots, **world)
        self.made = 0

    @property
    def answers(self) -> Any:
        """What is learned."""
        return self.world.side._answers

    def ask(self, units: int, before: list[bytes], kind: object = "think") -> Any:
        """Return a request whose prompt of `units` units begins as `before`, which has arrived and looked up."""
        self.made += 1
        request = self.world.request(f"r{self.made}", 0)
        request.block_hashes = list(before[:units])
        for unit, key in enumerate(before[:units]):
            self.world.prefixes[key] = list(before[: unit + 1])
        request.num_tokens = request.num_prompt_tokens = units * 16
        self.world._hash(request)
        self.world.side.on_new_request(request, None, kind)  # type: ignore[arg-type]
        return request

    def answer(self, request: Any, units: int) -> None:
        """Compute the prompt and decode it to `units` units."""
        self.world.admit(request)
        self.world.succeed(*self.world.step(request))
        self.world.grow(request, units)
        self.world.succeed(*self.world.step(request))

    def turn(
        self, before: list[bytes], kind: object = "think", *, prompt: int = PROMPT, stop: int = STOP
    ) -> list[bytes]:
        """Run one request to its end. Returns its hashes."""
        request = self.ask(prompt, before, kind)
        self.answer(request, stop)
        self.world.side.finished(request)
        return list(request.block_hashes)

    def next(self, before: list[bytes], kind: object = "think") -> None:
        """Ask with a prompt that begins as `before`, and give up after the lookup."""
        request = self.ask(max(PROMPT, len(before)) + 3, before, kind)
        self.world.ask(request)
        self.world.side.finished(request)

    def cut(self, times: int, kind: object = "think") -> None:
        """Have conversations of two turns, of which the second's prompt has not the first's answer."""
        for _ in range(times):
            self.next(self.turn([], kind)[:PROMPT], kind)

    def used(self, times: int, kind: object = "think") -> None:
        """Have conversations of two turns, of which the second's prompt begins with all of the first."""
        for _ in range(times):
            self.next(self.turn([], kind), kind)

    def end_unsaved(self) -> tuple[Any, list[Any]]:
        """Have a request end, of a kind whose answers are all cut, before its last save lands. Returns both."""
        self.cut(SEEN_MIN)
        request = self.ask(PROMPT, [])
        self.world.admit(request)
        self.world.succeed(*self.world.step(request))
        self.world.grow(request, STOP)
        jobs = self.world.step(request)
        self.world.side.finished(request)
        return request, jobs

    def chunk(self, hashes: list[bytes], number: int) -> Chunk | None:
        """Return the chunk with this number of a prefix."""
        return self.world.side.catalog.find(0, hashes[min((number + 1) * CHUNK, len(hashes)) - 1])

    def first(self, hashes: list[bytes]) -> list[int]:
        """Return the numbers of its chunks that go before all others, in this order."""
        numbers = {self.chunk(hashes, number): number for number in range(-(-len(hashes) // CHUNK))}
        return [numbers[one] for one in self.world.side.catalog._spared if one in numbers]


def test_a_template_that_cuts() -> None:
    """After some turns answers go first, the end before the beginning; prompts, and the chunk they end in, do not."""
    chat = Chat()
    chat.cut(SEEN_MIN - 1)
    assert chat.first(chat.turn([])) == []
    chat.cut(1)
    assert chat.first(chat.turn([])) == [3, 2]
    assert chat.world.side.stats()["decode_not_kept"] == 2


@pytest.mark.parametrize("used", [1, 7])
def test_share_of_used_answers_stays_when_counts_are_halved(used: int) -> None:
    """So many of each eight answers are used."""
    kind = AnswerKind()
    for number in range(10 * SEEN_MAX):
        kind.count(used=number % 8 < used)
    assert kind.used / kind.seen == pytest.approx(used / 8, abs=0.05)
    assert kind.seen <= SEEN_MAX


def test_answers_that_are_gone_on_with() -> None:
    """They are kept as ever, and so are those of a kind of which one in five is."""
    chat = Chat()
    for _ in range(SEEN_MIN):
        chat.used(1)
        chat.cut(4, "some")
        chat.used(1, "some")
    assert chat.first(chat.turn([])) == chat.first(chat.turn([], "some")) == []
    assert "decode_not_kept" not in chat.world.side.stats()


def test_what_goes_first() -> None:
    """In a full pool the answer makes room, and the prompts before it are still there."""
    chat = Chat()
    chat.cut(SEEN_MIN)
    catalog: Any = chat.world.side.catalog
    kept, cut = chat.turn([], "other"), chat.turn([])
    for _ in range(ANSWERS):
        catalog._evict_one()
    assert [chat.chunk(cut, number) is None for number in range(4)] == [False, False, True, True]
    assert chat.world.found(chat.ask(STOP, kept)) == STOP
    chat.world.check()


def test_a_use_takes_it_back() -> None:
    """An answer that somebody goes on with after all is kept: loaded, or held by the engine itself."""
    for local in (0, STOP * 16):
        chat = Chat()
        chat.cut(SEEN_MIN)
        hashes = chat.turn([])
        request = chat.ask(STOP + 1, hashes)
        if local:
            chat.world.admit_local(request, local)
        else:
            assert chat.world.admit(request) == STOP * 16
        assert 2 not in chat.first(hashes)
        chat.world.check()


def test_a_preempted_request_finds_its_answer() -> None:
    """What is of no more use later is of use while the request runs."""
    chat = Chat()
    chat.cut(int(3 / STORED_SHARE))
    request = chat.ask(PROMPT, [])
    chat.answer(request, STOP)
    assert chat.first(request.block_hashes) == []
    chat.world.preempt(request)
    request.num_tokens += 1
    assert chat.world.admit(request) == STOP * 16
    chat.world.succeed(*chat.world.step(request))
    chat.world.side.finished(request)
    assert chat.first(request.block_hashes) == [3, 2]


def test_with_quotas_nothing_goes_before_its_turn() -> None:
    """A tenant at its limit makes room from its own chunks, and nobody goes below what is sure."""
    accounts = Accounts(parse_quotas([{"name": "a", "salt": "a", "limit": 0.5}]), 4, Lru)
    catalog = SharedCatalog(4, 1, accounts, Counters())
    chunk = catalog.reserve(0)
    assert chunk is not None
    assert catalog.landed(catalog.write(chunk, 1, b"key", keep=True))
    assert catalog.spare([chunk]) == len(catalog._spared) == 0


def test_a_chunk_that_is_in_use_does_not_go_first() -> None:
    """Neither what is being written, nor what somebody writes on in, nor what has gone."""
    chat = Chat()
    chat.cut(SEEN_MIN)
    catalog, hashes = chat.world.side.catalog, chat.turn([])
    assert chat.first(hashes) == [3, 2]
    following = chat.ask(STOP + 1, hashes)
    chat.world.admit_local(following, STOP * 16)
    jobs = chat.world.step(following)
    assert chat.first(hashes) == []
    chunks = [catalog.find(0, key) for key in (hashes[-1], hashes[3 * CHUNK - 1])]
    evicted = chunks[1]
    assert evicted is not None
    assert catalog.evict(evicted)
    assert catalog.spare(chunk for chunk in chunks if chunk is not None) == 0
    chat.world.succeed(*jobs)


def _stored(chat: Chat) -> list[tuple[int, int]]:
    """Return what of one more request is offered to a tier: numbers of chunks, and how many units of each."""
    side, space = chat.world.side, Namespace()
    space.base = "space"
    stores = Storing(
        side.catalog, side.geometry, space, policies=["all"], bytes_in_flight_max=1 << 30, counters=Counters(),
        new_id=itertools.count(1).__next__,
    )  # fmt: skip
    patience: Any = SimpleNamespace(pace=Pace())
    side.staging = SimpleNamespace(stores=stores, plan=lambda **_: ((), ""), space=space, patience=patience)  # type: ignore[assignment]
    hashes = chat.turn([])
    side.staging = None
    numbers = {chat.chunk(hashes, number): number for number in range(4)}
    return [(numbers[offer.chunk], offer.units) for offer in stores._offers.values()]


def test_tiers() -> None:
    """They are spared answers later, as what is not stored is lost; prompts are stored."""
    chat = Chat()
    chat.cut(int(3 / STORED_SHARE) - 1)
    assert _stored(chat) == [(0, CHUNK), (1, CHUNK), (2, CHUNK), (3, 1)]
    chat.cut(1)
    assert _stored(chat) == [(0, CHUNK), (1, CHUNK)]


def test_a_chunk_that_lands_late() -> None:
    """The last save outlives the request."""
    chat = Chat()
    request, jobs = chat.end_unsaved()
    assert chat.first(request.block_hashes) == []
    chat.world.succeed(*jobs)
    assert sorted(chat.first(request.block_hashes)) == [2, 3]


def test_what_lands_after_it_was_used_is_kept() -> None:
    """Somebody has gone on with the answer before its last save has landed."""
    chat = Chat()
    request, jobs = chat.end_unsaved()
    following = chat.ask(STOP + 1, request.block_hashes)
    chat.world.ask(following, PROMPT * 16)
    chat.world.succeed(*jobs)
    assert chat.first(request.block_hashes) == []


def test_only_its_prompt_decides_what_a_request_goes_on_with() -> None:
    """One that is first looked up when it has decoded was not asked to go on with what it has decoded."""
    chat = Chat()
    hashes = chat.turn([])
    request = chat.ask(PROMPT, hashes)
    chat.world.grow(request, STOP)
    chat.world.ask(request)
    assert not chat.answers._kinds


def test_a_template_that_changes_is_noticed() -> None:
    """What was learned long ago counts less."""
    chat = Chat()
    chat.cut(SEEN_MAX + 8)
    assert chat.first(chat.turn([])) == [3, 2]
    chat.used(8)
    assert chat.first(chat.turn([])) == []


def test_answers_that_have_gone_are_still_learned_of() -> None:
    """By their hashes: who goes on with an answer that was evicted shows that it was of use."""
    chat = Chat()
    for _ in range(SEEN_MIN):
        hashes = chat.turn([])
        chat.world.side.catalog.evict(chat.chunk(hashes, 2))  # type: ignore[arg-type]
        chat.next(hashes)
    assert chat.answers._kinds["think"].used == SEEN_MIN


@pytest.mark.parametrize("held", [STOP, STOP - 1, 2 * CHUNK + 2, 2 * CHUNK, PROMPT])
def test_how_far_an_answer_is_held_makes_no_difference(held: int) -> None:
    """By the engine's own cache, of which prompts go on with all."""
    chat = Chat()
    request = chat.ask(STOP + 2, chat.turn([]))
    for key in request.block_hashes[:STOP]:
        if (chunk := chat.world.side.catalog.find(0, key)) is not None:
            chat.world.side.catalog.evict(chunk)
    chat.world.ask(request, held * 16)
    assert chat.answers._kinds["think"].used == 1


def test_prompts_that_share_their_beginning_only() -> None:
    """A system prompt whose questions differ within its last block shows nothing of answers, nor does a shorter one."""
    chat = Chat()
    system = [f"system/{unit}".encode() for unit in range(PROMPT)]
    for _ in range(SEEN_MIN + 8):
        chat.turn(system)
        chat.next(system)
        chat.next(system[: PROMPT - 2])
        chat.ask(PROMPT, system)
    kind = chat.answers._kinds["think"]
    assert (kind.cut, kind.used) == (0, 0)
    assert chat.first(chat.turn([])) == []


def test_a_request_is_looked_at_once() -> None:
    """When it comes: who waits is looked up in every step."""
    chat = Chat()
    first = chat.ask(PROMPT, [])
    chat.answer(first, STOP)
    following = chat.ask(STOP + 2, first.block_hashes)
    chat.world.ask(following)
    chat.world.side.finished(first)
    chat.world.ask(following)
    assert not chat.answers._kinds


def test_a_branch_is_no_cut_of_an_answer_that_is_used() -> None:
    """Whichever comes first."""
    for used_first in (True, False):
        chat = Chat()
        hashes = chat.turn([])
        for before in (hashes, hashes[:PROMPT])[:: 1 if used_first else -1]:
            chat.next(before)
        kind = chat.answers._kinds["think"]
        assert (kind.cut, kind.used) == (0, 1)


def test_who_asks_for_more() -> None:
    """Requests with wishes of their own, streaming sessions and requests of no kind are left as they are."""
    chat = Chat()
    chat.cut(SEEN_MIN)
    wishing = chat.ask(PROMPT, [], None)
    tracked = chat.world.side.requests.tracked[wishing.request_id]
    tracked.wishes = (Wish(Action.RETAIN, 60.0),)
    chat.answers.arrived(tracked, "think")
    chat.answer(wishing, STOP)
    chat.world.side.finished(wishing)
    assert chat.first(wishing.block_hashes) == []
    assert chat.first(chat.turn([], None)) == []


def test_short_answers_are_not_looked_at() -> None:
    """They have no chunk of their own."""
    chat = Chat()
    for _ in range(SEEN_MIN):
        chat.next(chat.turn([], stop=2 * CHUNK)[:PROMPT])
    assert not chat.answers._places
    assert not chat.answers._kinds


def test_memory_is_bounded() -> None:
    """Of kinds and of requests the latest are remembered."""
    chat = Chat(slots=64)
    for number in range(KINDS_MAX + 2):
        chat.cut(1, f"kind {number}")
    assert len(chat.answers._kinds) == KINDS_MAX
    assert "kind 0" not in chat.answers._kinds
    assert len(chat.answers._places) <= PLACES_MAX


@pytest.mark.parametrize(
    ("world", "policy"), [("used", "lru"), ("used", "s3fifo"), ("used", "sessions"), ("half", "lru")]
)
def test_a_trace_whose_answers_are_used_loses_nothing(world: World, policy: str) -> None:
    """Of recorded sessions of agents, under eviction: with learning the same hits, to the token."""
    off, on = (replay for _, replay in compare(world, policy, 0.05, sessions=8, seed=0))
    assert off.side.counters["evicted"] > 0
    assert (on.hit_tokens, on.side.counters["decode_not_kept"]) == (off.hit_tokens, 0)


def test_a_trace_whose_answers_are_cut_gains() -> None:
    """What makes room is of no use to anybody."""
    off, on = (replay for _, replay in compare("cut", "lru", 0.1, sessions=8, seed=0))
    assert on.side.counters["decode_not_kept"] > 0
    assert on.hit_tokens > off.hit_tokens
