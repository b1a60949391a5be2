"""The policy of sessions: what it learns of pauses, and whom it keeps."""

from __future__ import annotations

import math
import random

import pytest

from kvpipe.cache.catalog import Catalog, Owner, Piece
from kvpipe.cache.hints import Action, Hint
from kvpipe.cache.policy import Lru, Policy, Sessions
from kvpipe.cache.policy.base import Evictable
from kvpipe.cache.policy.guard import GuardedPolicy
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
    hinted_kind,
    kind_of,
    pace_after,
)
from kvpipe.testing.policy_conformance import Item
from kvpipe.trace.log import Counters
from tests.cache.chains import chain_of, chains

SLOTS = 40


def test_an_index_is_the_best_that_any_time_of_giving_up_promises() -> None:
    """As found by trying all of them."""
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
    """All of a kind return after ten seconds: one that has not after a minute is worth next to nothing."""
    returns = Returns()
    kind = kind_of(pace_after(None, 10))
    for _ in range(1000):
        returns.ended(kind)
        returns.returned(kind, 10)
    assert returns.worth(kind, 9) > returns.worth(kind, 1) > 20 * returns.worth(kind, 60)


def test_kinds_are_octaves_of_the_usual_pause() -> None:
    """None yet, less than two seconds, and so on; what the longest ones are is the same."""
    paces = [None, *(pace_after(None, 2**at + 0.5) for at in range(20))]
    kinds = [kind_of(pace) for pace in paces]
    assert kinds[:6] == [0, 1, 2, 3, 4, 5]
    assert len(set(kinds)) == 12
    assert pace_after(pace_after(None, 4), 8) == pytest.approx(2.3)


class _World:
    """Prompts of sessions, each over at once, in a pool of some slots."""

    def __init__(self, policy: Policy) -> None:
        self.now_s, self.requests = 0.0, 0
        self.catalog = Catalog(SLOTS, 1, policy, Counters(), clock=lambda: self.now_s)

    def serve(self, session: str, chunks: int) -> int:
        """Return how many of the prompt's chunks were held."""
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
    """A prompt of thirty chunks before every turn of a session of twenty, in forty slots."""
    assert _hits_among_scans(Lru()) == 299 * 10  # of each turn what the prompt in between has left
    assert _hits_among_scans(Sessions(SLOTS)) > 299 * 19


def test_sessions_that_take_turns_do_not_flush_each_other() -> None:
    """Of five sessions in turn, with room for two, LRU keeps the wrong ones: always."""

    def hits(policy: Policy) -> int:
        world, out = _World(policy), 0
        for turn in range(500):
            world.now_s += 3
            out += world.serve(str(turn % 5), 20)
        return out

    assert hits(Lru()) == 0
    assert hits(Sessions(SLOTS)) > 500 * 20 * 0.2


def test_a_prompt_goes_from_its_end() -> None:
    """Whatever the order was in which it was saved, and the end of a request reports its last chunk first."""
    policy = Sessions(SLOTS)
    items = [Item("a"), Item("b", "a"), Item("c", "b")]
    for item in items:
        policy.insert(item, hit=False)
    policy.request(1.0, over=True)
    for item in reversed(items):
        policy.refresh(item)
    assert [policy.victim() for _ in items] == items[::-1]


def test_nothing_is_left_of_chunks_that_others_evict() -> None:
    """Answers behind one prompt, of which each goes first, without the policy: it forgets their chains."""
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
        assert world.catalog.spare([chunk]) == 1
    assert world.serve("prompt", 2) == 2
    assert sum(map(len, policy._branches.values())) <= SLOTS
    assert not any(chain.held for chain in chains(policy))


def test_a_chunk_that_is_held_keeps_the_place_of_those_before_it() -> None:
    """What is gone from the middle of a chain stays in it until all behind it have gone."""
    policy = Sessions(SLOTS)
    items = [Item("a"), Item("b", "a"), Item("c", "b")]
    for item in items:
        policy.insert(item, hit=False)
    for item in items[1:]:
        policy.remove(item)
    policy.dropped(items[1])
    policy.insert(items[2], hit=False)
    assert [policy.victim(), policy.victim(), policy.victim()] == [items[2], items[0], None]


def test_what_follows_nothing_goes_first() -> None:
    """A chunk whose predecessor is gone is found by nobody, however new it is."""
    policy = Sessions(SLOTS)
    items = [Item("a"), Item("b", "a"), Item("orphan", "gone"), Item("c", "b")]
    for item in items:
        policy.insert(item, hit=False)
    assert [policy.victim() for _ in range(5)] == [items[2], items[3], items[1], items[0], None]


def test_what_comes_in_another_order_is_found_once_all_of_it_is_there() -> None:
    """Tiers bring a prompt's chunks as they can. Then older prompts go first, as if it had come in order."""
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


def test_where_a_prompt_branches_the_older_branch_is_a_chain_of_its_own() -> None:
    """The beginning goes after both branches."""
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


def test_a_session_that_went_is_known_by_its_pace_when_it_returns() -> None:
    """Its head has gone, with its history; it comes back to it."""
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


def test_what_waits_after_an_answer_is_of_a_kind_by_its_length() -> None:
    """It is worth what others were after such an answer; where nobody tells how long it was, what others were."""
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


def test_after_a_rare_answer_a_wait_without_a_hint_is_worth_what_such_waits_are() -> None:
    """Not what those of its pace are that a client has hinted: here, what is never used again is not hinted."""
    returns, pace = Returns(), kind_of(pace_after(None, 10))
    usual, rare = (SILENT + answer_class(tokens) + pace for tokens in (1, 500))
    for turn in range(600):
        returns.ended(pace)
        returns.returned(pace, 5.0)
        returns.waits(pace, rare if turn == 300 else usual)
    for _ in range(RENEW_MAX * PACES):
        returns.ended(0)
    assert returns.worth(rare, 4.0) < returns.worth(pace, 4.0) / 4


def test_a_save_that_lands_late_is_of_its_requests_answer() -> None:
    """The chain waits already: that it goes on growing is no wait of its own."""
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
    """Few returns after an answer of a length say little; many, what such a wait is worth. The others are as before."""
    returns, pace = Returns(), kind_of(pace_after(None, 10))
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


def test_what_is_announced_makes_kinds_by_the_octave() -> None:
    """Whatever number a client gives, it is a kind."""
    hinted = [hinted_kind(Action.RESUME, in_s) for in_s in (-math.inf, 0.0, 1.0, 2.0, 8191.0, 8192.0, 1e9, math.inf)]
    assert hinted == [RESUMES + octave for octave in (0, 0, 1, 2, 13, 14, 14, 14)]
    assert hinted_kind(Action.RESUME, math.nan) == RESUMES
    assert {hinted_kind(Action.RETAIN, 2.0**at) for at in range(-1, 20)} == set(range(RETAINS, DEMOTED))
    assert hinted_kind(Action.DEMOTE, 5.0) == DEMOTED


def test_lies_are_found_out() -> None:
    """Chains return after three seconds, as they always have; it is announced that it will take an hour."""
    returns, paced, hinted = Returns(), kind_of(pace_after(None, 3)), hinted_kind(Action.RESUME, 3600.0)
    for _ in range(1200):
        returns.ended(paced)
        returns.returned(paced, 3)
    for _ in range(30):
        returns.ended(hinted)
        returns.proven(hinted, paced, 3)
        returns.returned(hinted, 3)
    assert not returns.trusts


def test_one_lie_is_not_everybodys() -> None:
    """Chains return as was announced, but some in an hour: of those it was announced, too, and they came at once."""
    returns, paced = Returns(), kind_of(pace_after(None, 3))
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


def test_what_a_client_demotes_goes_first() -> None:
    """Though it was used last, and the other waits for long."""
    world = _World(Sessions(SLOTS))
    world.serve("waits", 20)
    world.now_s = 100.0
    world.serve("over", 20)
    assert _hinted(world, "over", Hint(Action.DEMOTE)) == 20
    world.serve("new", 20)
    assert _there(world, "waits", "over", "new") == ["waits", "new"]


@pytest.mark.parametrize("action", [Action.RESUME, Action.RETAIN])
def test_of_two_that_are_alike_the_one_that_is_announced_to_come_soon_stays(action: Action) -> None:
    """The other is announced to come in an hour."""
    for names in (("soon", "later"), ("later", "soon")):
        world = _World(Sessions(SLOTS))
        for name in names:
            world.serve(name, 20)
            hint = Hint(action, 10.0) if name == "soon" else Hint(Action.RESUME, 3600.0)
            assert _hinted(world, name, hint) == 20
        for turn in range(8 * KINDS):  # until what was announced is counted in
            world.now_s += 0.01
            world.serve("short", 0 if turn else 1)
        world.serve("new", 20)
        assert _there(world, "soon", "later") == ["soon"]


def test_a_prefix_that_others_use_is_not_demoted_for_one() -> None:
    """Two sessions begin alike; one of them is over."""
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


def test_what_is_set_for_the_next_wait_holds_when_it_begins() -> None:
    """A request that runs is spoken of; once it is used again, that is over."""
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
def test_a_save_that_lands_after_its_request_is_no_use(*, there: bool) -> None:
    """What its client has announced goes on to hold, and the session's pace is not the time of a copy."""
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
    """Notes what a policy of sessions is given."""

    def __init__(self) -> None:
        """Nothing yet."""
        super().__init__()
        self.noted: list[tuple[float, bool]] = []

    def request(self, now_s: float, *, over: bool) -> None:
        """Note it."""
        self.noted.append((now_s, over))


@pytest.mark.parametrize("guarded", [False, True])
def test_the_catalog_shows_when_and_whether_a_request_is_over(*, guarded: bool) -> None:
    """At a save, one that lands after the end, a lease, its return, and the end."""
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
    """Takes hints."""

    def __init__(self) -> None:
        """Nothing yet."""
        super().__init__()
        self.noted: list[tuple[Evictable, Hint]] = []

    def hint(self, chunk: Evictable, hint: Hint) -> None:
        """Note it."""
        self.noted.append((chunk, hint))


@pytest.mark.parametrize("guarded", [False, True])
def test_the_catalog_hands_hints_on(*, guarded: bool) -> None:
    """Of chunks that may go and of those that are held; a policy without `hint` is not asked, guarded or not."""
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
