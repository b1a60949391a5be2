"""Tests of the policy of sessions: how it estimates pauses, and which sessions it keeps."""

from __future__ import annotations

import math
import random

import pytest

from kvpipe.cache.catalog import Catalog
from kvpipe.cache.chunks import Owner, Piece
from kvpipe.cache.policy import Lru, Policy, Sessions
from kvpipe.cache.policy.base import Evictable
from kvpipe.cache.policy.guard import GuardedPolicy
from kvpipe.cache.policy.hints import Action, Hint
from kvpipe.cache.policy.returns import (
    _EDGES_S,
    BINS,
    DEMOTED,
    KINDS,
    PACES,
    RENEW_MAX,
    RESUMES,
    RETAINS,
    SILENT,
    Returns,
    _indices,
    answer_class,
    chain_kind,
    hinted_kind,
    pace_after,
)
from kvpipe.testing.policy_conformance import Item
from kvpipe.trace.log import Counters
from tests.cache.chains import chain_of, chains

SLOTS = 40


def test_an_index_is_the_best_that_any_time_of_giving_up_promises() -> None:
    """A chain's index is its value if the policy gives the chain up at the best possible time."""
    rng = random.Random(0)
    chances = [rng.random() ** 4 for _ in range(BINS)]
    for first, index in enumerate(_indices(chances)):
        best = hits = waits_s = 0.0
        stays = 1.0
        for chance, low, high in list(zip(chances, _EDGES_S, _EDGES_S[1:], strict=False))[first:]:
            hits += stays * chance
            waits_s += stays * (high - low) * chance / -math.log1p(-chance)
            stays *= 1 - chance
            best = max(best, hits / waits_s)
        assert index == pytest.approx(best)


def test_a_chain_that_is_overdue_is_worth_less() -> None:
    """All other chains of a kind return after ten seconds.

    A chain that has not returned after a minute is worth almost nothing.
    """
    returns = Returns()
    kind = chain_kind(pace_after(None, 10))
    for _ in range(1000):
        returns.ended(kind)
        returns.returned(kind, 10)
    assert returns.worth(kind, 9) > returns.worth(kind, 1) > 20 * returns.worth(kind, 60)


def test_kinds_are_octaves_of_the_usual_pause() -> None:
    """The kinds are: no pause yet, less than two seconds, and one kind per octave.

    All longest pauses share one kind.
    """
    paces = [None, *(pace_after(None, 2**at + 0.5) for at in range(20))]
    kinds = [chain_kind(pace) for pace in paces]
    assert kinds[:6] == [0, 1, 2, 3, 4, 5]
    assert len(set(kinds)) == 12
    assert pace_after(pace_after(None, 4), 8) == pytest.approx(2.3)


class _World:
    """Prompts of sessions, which end at once, in a pool with some slots."""

    def __init__(self, policy: Policy) -> None:
        self.now_s, self.requests = 0.0, 0
        self.catalog = Catalog(SLOTS, 1, policy, Counters(), clock=lambda: self.now_s)

    def serve(self, session: str, chunks: int) -> int:
        """Serve a prompt, and return how many of its chunks were held."""
        catalog, keys = self.catalog, [f"{session}/{i}".encode() for i in range(chunks)]
        self.requests += 1
        owner = Owner("r", self.requests)
        found = [catalog.find(0, key) for key in keys]
        held = found.index(None) if None in found else chunks
        catalog.lease(owner, [chunk for chunk in found[:held] if chunk is not None])
        for base in range(held, chunks):
            if not catalog.known(0, keys[base]):
                chunk = catalog.reserve(0)
                assert chunk is not None
                before = keys[base - 1] if base else b""
                catalog.landed(catalog.write(chunk, 1, keys[base], keep=True, base=base, before=before))
        catalog.release(owner)
        catalog.refresh(chunk for key in reversed(keys) if (chunk := catalog.find(0, key)) is not None)
        return held


def _hits_among_scans(policy: Policy) -> int:
    world, hits = _World(policy), 0
    for turn in range(300):
        world.now_s += 5
        world.serve(f"once {turn}", 30)
        world.now_s += 5
        hits += world.serve("goes on", 20)
    return hits


def test_one_time_prompts_do_not_flush_a_session() -> None:
    """A prompt of thirty chunks precedes every turn of a session of twenty chunks. The pool has forty slots."""
    assert _hits_among_scans(Lru()) == 299 * 10  # a turn hits the 10 chunks that the preceding prompt has left
    assert _hits_among_scans(Sessions(SLOTS)) > 299 * 19


def test_sessions_that_take_turns_do_not_flush_each_other() -> None:
    """Five sessions take turns in a pool with room for two.

    LRU never hits, and `Sessions` hits over 20% of the chunks.
    """

    def hits(policy: Policy) -> int:
        world, out = _World(policy), 0
        for turn in range(500):
            world.now_s += 3
            out += world.serve(str(turn % 5), 20)
        return out

    assert hits(Lru()) == 0
    assert hits(Sessions(SLOTS)) > 500 * 20 * 0.2


def test_last_chunk_of_a_prompt_is_evicted_first() -> None:
    """A prompt's last chunk is evicted first, in whatever order its chunks were saved or refreshed."""
    policy = Sessions(SLOTS)
    items = [Item("a"), Item("b", "a"), Item("c", "b")]
    for item in items:
        policy.insert(item, hit=False)
    policy.request(1.0, over=True)
    for item in reversed(items):
        policy.refresh(item)
    assert [policy.victim() for _ in items] == items[::-1]


def test_chains_are_forgotten_when_an_operator_evicts_their_chunks() -> None:
    """An operator evicts each answer of one prompt. The policy forgets the chains of the answers."""
    policy = Sessions(SLOTS)
    world = _World(policy)
    for turn in range(10 * SLOTS):
        world.now_s += 5
        key = str(turn).encode()
        world.serve("prompt", 2)
        chunk = world.catalog.reserve(0)
        assert chunk is not None
        world.catalog.landed(world.catalog.write(chunk, 1, key, keep=True, base=2, before=b"prompt/1"))
        world.catalog.refresh([chunk])
        assert world.catalog.evict(chunk)
    assert world.serve("prompt", 2) == 2
    assert sum(map(len, policy._branches.values())) <= SLOTS
    assert not any(chain.held for chain in chains(policy))


def test_held_chunk_keeps_the_places_of_evicted_chunks_before_it() -> None:
    """An evicted chunk keeps its place in the middle of a chain until all chunks behind that place are evicted."""
    policy = Sessions(SLOTS)
    items = [Item("a"), Item("b", "a"), Item("c", "b")]
    for item in items:
        policy.insert(item, hit=False)
    for item in items[1:]:
        policy.remove(item)
    policy.dropped(items[1])
    policy.insert(items[2], hit=False)
    assert [policy.victim(), policy.victim(), policy.victim()] == [items[2], items[0], None]


def test_chunk_without_its_predecessor_is_evicted_first() -> None:
    """A chunk without its predecessor cannot be found, so it is evicted first, however new it is."""
    policy = Sessions(SLOTS)
    items = [Item("a"), Item("b", "a"), Item("orphan", "gone"), Item("c", "b")]
    for item in items:
        policy.insert(item, hit=False)
    assert [policy.victim() for _ in range(5)] == [items[2], items[3], items[1], items[0], None]


def test_chunks_of_a_prompt_may_arrive_in_any_order() -> None:
    """Tiers return a prompt's chunks in any order. When all chunks have arrived, the order of arrival has no effect."""
    policy, old = Sessions(SLOTS), [Item("x"), Item("y", "x"), Item("z", "y")]
    names = "abcdef"
    prompt = [Item(name, before) for name, before in zip(names, ["", *names], strict=False)]
    for now_s, items, order in ((10.0, old, (0, 1, 2)), (20.0, prompt, (0, 2, 4, 3, 5, 1))):
        policy.request(now_s, over=False)
        for at in order:
            policy.insert(items[at], hit=False)
        policy.request(now_s + 1, over=True)
        policy.refresh_all(items[::-1])
    policy.request(30.0, over=False)
    assert [policy.victim() for _ in range(9)] == [*old[::-1], *prompt[::-1]]


def test_branches_of_a_prompt_are_evicted_before_their_common_beginning() -> None:
    """The common beginning is evicted after both branches."""
    policy = Sessions(SLOTS)
    old = [Item("a"), Item("b", "a"), Item("c", "b"), Item("d", "c")]
    for item in old:
        policy.insert(item, hit=False)
    new = [Item("x", "b"), Item("y", "x")]
    for item in new:
        policy.insert(item, hit=False)
    assert chain_of(policy, old[0]) is chain_of(policy, old[1])
    assert chain_of(policy, old[2]) is chain_of(policy, old[3]) is not chain_of(policy, old[0])
    victims = [policy.victim() for _ in range(6)]
    assert victims[4:] == [old[1], old[0]]
    assert victims.index(old[3]) < victims.index(old[2])
    assert victims.index(new[1]) < victims.index(new[0])


def test_pace_of_a_session_is_known_when_its_first_chunks_were_evicted() -> None:
    """The session's first chunks were evicted together with its history. When it returns, the policy knows its pace."""
    policy, now_s = Sessions(SLOTS), 0.0
    for _ in range(4):
        item = Item("head")
        policy.request(now_s, over=False)
        policy.insert(item, hit=False)
        policy.request(now_s, over=True)
        policy.refresh(item)
        assert policy.victim() is item
        now_s += 16
    chain = policy._gone["head"]
    assert chain.pace == pytest.approx(4)
    assert chain.paced == 5


def test_chain_after_an_answer_has_a_kind_by_the_length_of_the_answer() -> None:
    """After an answer of known length, the chain is worth as much as other chains after answers of that length.

    Without a known length, the chain is worth as much as the mean of all chains.
    """
    policy, first, last = Sessions(SLOTS), Item("a"), Item("b", "a")
    for item in (first, last):
        policy.insert(item, hit=False)
    kinds = []
    for turn, tokens in enumerate((127, 128, 1024, None)):
        policy.request(10.0 * turn + 1, over=True)
        if tokens is not None:
            policy.answered(tokens)
        for item in (last, first):
            policy.refresh(item)
        policy.request(10.0 * turn + 2, over=False)
        chain = chain_of(policy, first)
        kinds.append(chain.kind - chain.paced)
    assert kinds == [SILENT + PACES, SILENT + 2 * PACES, SILENT + 3 * PACES, SILENT]
    assert min(policy._returns._ended[:RESUMES]) >= 0
    counted = [sum(policy._returns._returned[kind]) for kind in range(RESUMES)]
    assert [sum(counted[at : at + PACES]) for at in range(0, RESUMES, PACES)] == [3, 0, 1, 1, 1]


def test_estimate_for_a_rare_length_of_answers_leaves_out_waits_with_hints() -> None:
    """If answers of some length are rare, their estimate uses all waits of the same pace, but not waits with hints.

    In this test only chunks that return have hints.
    """
    returns, pace = Returns(), chain_kind(pace_after(None, 10))
    usual, rare = (SILENT + answer_class(tokens) + pace for tokens in (1, 500))
    for turn in range(600):
        returns.ended(pace)
        returns.returned(pace, 5.0)
        returns.waits(pace, rare if turn == 300 else usual)
    for _ in range(RENEW_MAX * PACES):
        returns.ended(0)
    assert returns.worth(rare, 4.0) < returns.worth(pace, 4.0) / 4


def test_late_save_does_not_begin_another_wait() -> None:
    """The chain is already waiting when the save lands, so the save does not begin another wait."""
    policy, first, late = Sessions(SLOTS), Item("a"), Item("a")
    policy.insert(first, hit=False)
    policy.request(1.0, over=True)
    policy.answered(500)
    policy.refresh(first)
    policy.request(2.0, over=True)
    assert chain_of(policy, first).answer == answer_class(500)
    assert policy.victim() is first
    policy.insert(late, hit=False)
    assert chain_of(policy, late).kind == SILENT + answer_class(500) + chain_of(policy, late).paced


def test_answers_count_beside_the_pace_of_their_chains() -> None:
    """After few returns with answers of some length, the pace of the chain almost alone decides its worth.

    After many returns, these returns decide. Other chains are unaffected.
    """
    returns, pace = Returns(), chain_kind(pace_after(None, 10))
    short, long = (SILENT + answer_class(tokens) + pace for tokens in (1, 5000))
    for turn in range(600):
        returns.waits(pace, short if turn % 2 else long)
        returns.back(pace, short if turn % 2 else long, 5.0 if turn % 2 else 500.0)
    assert returns.worth(short, 4.0) > 2 * returns.worth(pace, 4.0) > 4 * returns.worth(long, 4.0)
    rare = SILENT + answer_class(500) + pace
    assert returns.worth(rare, 4.0) == returns.worth(pace, 4.0)
    returns.waits(pace, rare)
    for _ in range(RENEW_MAX * PACES):
        returns.ended(0)
    assert returns.worth(rare, 4.0) == pytest.approx(returns.worth(pace, 4.0), rel=0.1)


def test_hinted_kind_accepts_every_number_of_seconds() -> None:
    """A chain with a hint gets a kind, whatever number of seconds the client gives. Infinities and NaN are included."""
    hinted = [hinted_kind(Action.RESUME, in_s) for in_s in (-math.inf, 0.0, 1.0, 2.0, 8191.0, 8192.0, 1e9, math.inf)]
    assert hinted == [RESUMES + octave for octave in (0, 0, 1, 2, 13, 14, 14, 14)]
    assert hinted_kind(Action.RESUME, math.nan) == RESUMES
    assert {hinted_kind(Action.RETAIN, 2.0**at) for at in range(-1, 20)} == set(range(RETAINS, DEMOTED))
    assert hinted_kind(Action.DEMOTE, 5.0) == DEMOTED


def test_retained_chain_is_worth_little_after_its_time() -> None:
    """After 10 s, a chain retained for 60 s is worth more than a chain retained for 7,200 s.

    After 600 s, it is worth less.
    """
    returns = Returns()
    minute, hours = (hinted_kind(Action.RETAIN, in_s) for in_s in (60.0, 7200.0))
    assert returns.worth(minute, 10.0) > 1.5 * returns.worth(hours, 10.0)
    assert returns.worth(hours, 600.0) > 1.5 * returns.worth(minute, 600.0)


def test_hints_are_not_trusted_when_they_are_always_wrong() -> None:
    """Clients announce a return in an hour, and the chains return after three seconds."""
    returns, paced, hinted = Returns(), chain_kind(pace_after(None, 3)), hinted_kind(Action.RESUME, 3600.0)
    for _ in range(1200):
        returns.ended(paced)
        returns.returned(paced, 3)
    for _ in range(30):
        returns.ended(hinted)
        returns.proven(hinted, paced, 3)
        returns.returned(hinted, 3)
    assert not returns.trusts


def test_hints_are_trusted_when_a_few_of_them_are_wrong() -> None:
    """Most chains return as announced. A few chains are announced to return in four hours, but return at once."""
    returns, paced = Returns(), chain_kind(pace_after(None, 3))
    for turn in range(1200):
        returns.ended(paced)
        returns.returned(paced, 0.75 * 2 ** (turn % 12))
    for turn in range(200):
        for hinted_s, idle_s in [(4 * 3600.0, 3.0)] * (turn % 3 == 0) + [(20.0, 20.0)]:
            hinted = hinted_kind(Action.RESUME, hinted_s)
            returns.ended(hinted)
            returns.proven(hinted, paced, idle_s)
            returns.returned(hinted, idle_s)
            assert returns.trusts


def _hinted(world: _World, name: str, hint: Hint) -> int:
    found = [chunk for at in range(20) if (chunk := world.catalog.find(0, f"{name}/{at}".encode()))]
    world.catalog.hint(found, hint)
    return len(found)


def _there(world: _World, *names: str) -> list[str]:
    return [name for name in names if world.catalog.find(0, f"{name}/0".encode()) is not None]


def test_demoted_chunk_is_evicted_first() -> None:
    """The demoted chunk is evicted first, although it was used 100 s later than the other session's chunk."""
    world = _World(Sessions(SLOTS))
    world.serve("waits", 20)
    world.now_s = 100.0
    world.serve("over", 20)
    assert _hinted(world, "over", Hint(Action.DEMOTE)) == 20
    world.serve("new", 20)
    assert _there(world, "waits", "over", "new") == ["waits", "new"]


@pytest.mark.parametrize("action", [Action.RESUME, Action.RETAIN])
def test_chain_that_is_announced_to_return_sooner_stays(action: Action) -> None:
    """One chain is announced to return soon, and stays. The second chain is announced to return in an hour."""
    for names in (("soon", "later"), ("later", "soon")):
        world = _World(Sessions(SLOTS))
        for name in names:
            world.serve(name, 20)
            hint = Hint(action, 10.0) if name == "soon" else Hint(Action.RESUME, 3600.0)
            assert _hinted(world, name, hint) == 20
        for turn in range(8 * KINDS):  # these turns last until the policy has counted all announcements
            world.now_s += 0.01
            world.serve("short", 0 if turn else 1)
        world.serve("new", 20)
        assert _there(world, "soon", "later") == ["soon"]


def test_shared_prefix_is_not_demoted_when_one_session_ends() -> None:
    """Two sessions have a common beginning, and only the first session ends."""
    policy = Sessions(SLOTS)
    shared, one, other = Item("s"), Item("a", "s"), Item("b", "s")
    for item in (shared, one, other):
        policy.insert(item, hit=False)
    policy.request(1.0, over=True)
    for item in (one, shared):
        policy.refresh(item)
    for item in (one, shared):
        policy.hint(item, Hint(Action.DEMOTE))
    assert (chain_of(policy, one).hinted, chain_of(policy, shared).hinted) == (DEMOTED, 0)
    assert policy.victim() is one


def test_hint_of_a_running_request_is_used_from_its_end_on() -> None:
    """A hint arrives while its request runs.

    The hint is used from the request's end until the chunks are used again.
    """
    policy, item = Sessions(SLOTS), Item("a")
    policy.insert(item, hit=False)
    policy.remove(item)
    policy.hint(item, Hint(Action.RESUME, 40.0))
    policy.hint(Item("unknown"), Hint(Action.RESUME, 1.0))
    policy.request(10.0, over=True)
    policy.insert(item, hit=True)
    policy.refresh(item)
    policy.request(20.0, over=False)
    chain = chain_of(policy, item)
    assert (chain.hinted, chain.kind) == (hinted_kind(Action.RESUME, 30.0),) * 2
    policy.refresh(item)
    assert (chain.hinted, chain.hint) == (0, None)


def _save(catalog: Catalog, key: bytes, before: bytes) -> Piece:
    chunk = catalog.reserve(0)
    assert chunk is not None
    return catalog.write(chunk, 1, key, keep=True, base=len(before), before=before)


@pytest.mark.parametrize("there", [True, False])
def test_save_that_lands_after_its_request_does_not_count_as_a_use(*, there: bool) -> None:
    """A save that lands late keeps the client's hint, and its time is not counted as a pause of the session."""
    policy, now_s = Sessions(SLOTS), 10.0
    catalog = Catalog(SLOTS, 1, policy, Counters(), clock=lambda: now_s)
    pieces, hint = [_save(catalog, b"a", b""), _save(catalog, b"b", b"a")], Hint(Action.RESUME, 50.0)
    early = pieces[:1] if there else []
    for piece in early:
        assert catalog.landed(piece)
    catalog.refresh(piece.chunk for piece in early)
    catalog.hint((piece.chunk for piece in early), hint)
    now_s = 11.0
    for piece in pieces[len(early) :]:
        assert catalog.landed(piece, over=True)
        catalog.hint([piece.chunk], hint)
    chain = chain_of(policy, pieces[1].chunk)
    assert chain is chain_of(policy, pieces[0].chunk)
    assert (chain.pace, chain.ended_s, chain.hint) == (None, 10.0 if there else 11.0, hint)
    assert chain.kind == chain.hinted == hinted_kind(Action.RESUME, 40.0 if there else 39.0)
    now_s = 43.0
    assert catalog.landed(_save(catalog, b"c", b"b"))
    assert (chain.pace, chain.ended_s, chain.hint) == (math.log2(33 if there else 32), None, None)


class _Noting(Lru):
    """A policy of sessions that records the calls of `request`."""

    def __init__(self) -> None:
        """Start without recorded calls."""
        super().__init__()
        self.noted: list[tuple[float, bool]] = []

    def request(self, now_s: float, *, over: bool) -> None:
        """Record the call."""
        self.noted.append((now_s, over))


@pytest.mark.parametrize("guarded", [False, True])
def test_the_catalog_shows_when_and_whether_a_request_is_over(*, guarded: bool) -> None:
    """The policy is called at a save, a lease, its release and the request's end, and if a save lands after the end."""
    noting = _Noting()
    policy = GuardedPolicy(noting, "noting", print) if guarded else noting
    clock = iter(range(1, 10))
    catalog = Catalog(4, 1, policy, Counters(), clock=lambda: float(next(clock)))
    chunk = catalog.reserve(0)
    assert chunk is not None
    catalog.landed(catalog.write(chunk, 1, b"k", keep=True, base=1, before=b"j"))
    catalog.landed(catalog.write(chunk, 2, b"kk", keep=False, base=1, before=b"j"), over=True)
    assert (chunk.identity, chunk.before) == (b"kk", b"j")
    catalog.lease(Owner("r", 1), [chunk])
    catalog.release(Owner("r", 1))
    catalog.refresh(iter([chunk]), over=False)
    catalog.refresh(iter([chunk]))
    assert noting.noted == [(1.0, False), (2.0, True), (3.0, False), (4.0, False), (5.0, False), (6.0, True)]


class _Hinted(Lru):
    """A policy that records the hints that it gets."""

    def __init__(self) -> None:
        """Start without recorded hints."""
        super().__init__()
        self.noted: list[tuple[Evictable, Hint]] = []

    def hint(self, chunk: Evictable, hint: Hint) -> None:
        """Record the hint."""
        self.noted.append((chunk, hint))


@pytest.mark.parametrize("guarded", [False, True])
def test_the_catalog_passes_hints_to_the_policy(*, guarded: bool) -> None:
    """The catalog passes hints on for evictable and held chunks.

    A policy without the method `hint` gets none.
    """
    hint, hinted = Hint(Action.RESUME, 7.0), _Hinted()
    for policy in (hinted, Lru()):
        catalog = Catalog(4, 1, GuardedPolicy(policy, "hinted", print) if guarded else policy, Counters())
        chunks = [catalog.reserve(0) for _ in range(2)]
        assert chunks[0] is not None
        catalog.landed(catalog.write(chunks[0], 1, b"k", keep=True))
        there = [chunk for chunk in chunks if chunk is not None]
        catalog.hint(there, hint)
        assert catalog.takes_hints == (policy is hinted)
        if policy is hinted:
            assert hinted.noted == [(chunk, hint) for chunk in there]
