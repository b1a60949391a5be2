"""The internal data of the policy of sessions stays consistent after any calls."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Hashable, Iterator

import pytest

from kvpipe.cache.catalog import Catalog
from kvpipe.cache.chunks import Chunk, Owner, Piece
from kvpipe.cache.policy import Sessions
from kvpipe.cache.policy.chain import NONE, NOTHING, Chain
from kvpipe.cache.policy.hints import Action, Hint
from kvpipe.cache.policy.queues import Queues
from kvpipe.cache.policy.returns import Returns
from kvpipe.testing.policy_conformance import Item
from kvpipe.trace.log import Counters
from tests.cache.chains import chain_of, chains

SLOTS = 40


def _abc() -> tuple[Sessions, list[Item]]:
    """Return a policy that has a chain of three chunks, and the chunks."""
    policy, chain = Sessions(SLOTS), [Item("a"), Item("b", "a"), Item("c", "b")]
    for item in chain:
        policy.insert(item, hit=False)
    return policy, chain


def test_a_chunk_that_is_read_keeps_its_place() -> None:
    """A request holds the first chunk of a chain.

    When the later chunks are refreshed, the first chunk keeps its place.
    """
    policy, chain = _abc()
    policy.remove(chain[0])
    policy.request(40.0, over=True)
    for item in chain[:0:-1]:
        policy.refresh(item)
    policy.request(41.0, over=False)
    assert chain_of(policy, chain[1]).stack == chain


def test_another_groups_chunk_does_not_become_the_end() -> None:
    """A second group's chunks have the keys of the first two chunks of the prefix, and are saved after the prefix."""
    policy, chain = _abc()
    others = [Item("a"), Item("b", "a")]
    for item in others:
        policy.insert(item, hit=False)
    assert chain_of(policy, chain[0]).stack[-1] is chain[-1]
    assert policy.victim() is chain[-1]


def test_evicted_chain_that_is_saved_again_is_known() -> None:
    """A request held a chunk of the chain while the other chunks were evicted. All chunks are then saved again."""
    policy = Sessions(8)
    a, b = Item("a"), Item("b", "a")
    policy.insert(a, hit=False)
    policy.insert(b, hit=False)
    policy.request(1.0, over=True)
    policy.refresh(b)
    policy.refresh(a)
    policy.remove(b)
    policy.remove(a)
    policy.insert(a, hit=True)
    assert policy.victim() is a
    policy.insert(b, hit=True)
    _consistent(policy)


def test_a_requests_chunks_at_once_are_as_one_by_one() -> None:
    """One call for all chunks of a request has the same effect as one call for each chunk.

    Two prompts begin equally, one request has a part of a prompt, and some chunks are unknown or held.
    """
    prompts = [["a", "b", "c", "d"], ["a", "b", "x", "y", "z"], ["b", "c"], ["a", "b"]]
    behind = {name: before for names in prompts[:2] for name, before in zip(names, ["", *names], strict=False)}

    def victims(policy: Sessions) -> list[Hashable]:
        return [None if chunk is None else chunk.identity for chunk in [policy.victim() for _ in behind]]

    for first, names in itertools.product(["", "c"], [*prompts, ["d", "x"], ["b", "x", "unknown"]]):
        one, other, runs = Sessions(SLOTS), Sessions(SLOTS), list[list[Item]]()
        for policy in (one, other):
            items = {name: Item(name, before) for name, before in behind.items()}
            for item in items.values():
                policy.insert(item, hit=False)
            policy.request(1.0, over=True)
            if first:
                policy.remove(items[first])
            runs.append([items.get(name, Item(name)) for name in names])
        run, at_once = runs
        for item in run:
            one.remove(item)
            _consistent(one)
        other.remove_all(at_once)
        assert victims(one) == victims(other)
        for item in reversed(run):
            one.insert(item, hit=True)
        other.insert_all(at_once[::-1], hit=True)
        for policy in (one, other):
            _consistent(policy)
            policy.request(30.0, over=True)
        for item in reversed(run):
            one.refresh(item)
        other.refresh_all(at_once[::-1])
        assert victims(one) == victims(other)
        _consistent(other)


def test_new_chunk_in_the_middle_splits_a_chain() -> None:
    """A chunk of another group follows the middle of a chain, and is released together with the chain.

    Afterwards all of these chunks may be evicted.
    """
    policy, chain = _abc()
    policy.remove_all(chain)
    policy.insert_all([Item("y", "b"), *chain[::-1]], hit=True)
    _consistent(policy)
    assert len(policy) == 4


def test_dropped_chunk_does_not_count_as_held() -> None:
    """A dropped chunk still has a place in its chain.

    A later read of the whole chain must not count that chunk as held.
    """
    policy, chain = _abc()
    policy.remove(chain[1])
    policy.dropped(chain[1])
    policy.remove_all(chain)
    _consistent(policy)
    assert len(policy) == 0


def test_most_places_of_evicted_chunks_are_removed() -> None:
    """The middle chunk is evicted and saved again 100 times.

    Each eviction leaves a place, and most places are removed again.
    """
    policy, chain = _abc()
    middle = chain[1]
    for _ in range(100):
        policy.remove(middle)
        policy.dropped(middle)
        middle = Item("b", "a")
        policy.insert(middle, hit=False)
        _consistent(policy)
    assert len(chain_of(policy, middle).stack) < 20
    assert [policy.victim(), policy.victim(), policy.victim()].count(None) == 0


@pytest.mark.parametrize("saved_first", [False, True])
def test_places_of_evicted_chunks_are_no_chain(*, saved_first: bool) -> None:
    """If only places of evicted chunks follow the shared prefix, the next prompt continues the same chain."""
    policy, (a, b, c, d) = Sessions(SLOTS), (Item("a"), Item("b", "a"), Item("c", "b"), Item("d", "c"))
    for item in (a, b, c, d):
        policy.insert(item, hit=False)
    policy.remove(c)
    policy.dropped(c)
    assert policy.victim() is d
    new = Item("x", "b")
    if saved_first:
        policy.insert(new, hit=False)
    policy.request(1.0, over=True)
    for item in (*(new,) * saved_first, b, a):
        policy.refresh(item)
    policy.request(2.0, over=False)
    if not saved_first:
        policy.insert(new, hit=False)
    _consistent(policy)
    assert chain_of(policy, new).stack == [a, b, new]
    assert not chain_of(policy, a).shared
    assert not policy._branches


def test_few_identities_are_forgotten_at_once_in_a_small_pool() -> None:
    """A policy of four slots knows eight identities. The ninth identity replaces only the oldest one."""
    policy, items = Sessions(4), [Item(f"{i}") for i in range(9)]
    for item in items:
        policy.insert(item, hit=False)
    assert [*policy._known] == [item.identity for item in items[1:]]


def _least(queues: Queues, returns: Returns, now_s: float) -> Chain | None:
    """Return the chain with the least value among the oldest and the newest chain of each kind."""
    ends = [one for queue in queues.by_kind if queue for one in (next(iter(queue)), next(reversed(queue)))]
    return min(ends, key=lambda one: (returns.worth(one.kind, now_s - one.used_s), one.used_s), default=None)


def _consistent(policy: Sessions) -> None:
    """Check that the policy's internal data is consistent."""
    there_is = chains(policy)
    assert len({chain.number for chain in there_is}) == len(there_is) == len(policy._chains) - 1 - len(policy._numbers)
    assert sum(len(chain.held) for chain in there_is) == policy._held
    assert not NOTHING
    for chain in there_is | {*policy._known.values()}:
        there = {chunk for chunk in chain.stack if chunk.place == chain.number}
        assert (policy._chains[chain.number] is chain) == bool(there) == (chain.number != NONE)
        assert chain.held <= there
        assert chain.free == len(there) - len(chain.held)
        queue = policy._orphans if chain.orphan else policy._queues.by_kind[chain.kind]
        assert (chain in queue) == (chain.free > 0)
        assert not chain.stack or chain not in policy._gone.values()
    queued = [chain for queue in (*policy._queues.by_kind, policy._orphans) for chain in queue]
    assert len(queued) == len({*queued})
    assert sum(chain.free for chain in queued) == len(policy)
    lru, learnt = policy._duel._lru, policy._duel._learnt
    assert lru.used == sum(chain.lru_kept for chain in lru.order) <= policy._slots
    assert all(chain.lru_kept for chain in lru.order)
    kept = {chain: kind for kind, queue in enumerate(learnt.queues.by_kind) for chain in queue}
    assert learnt.used == sum(chain.learnt_kept for chain in kept) <= policy._slots
    assert all(chain.learnt_kept and chain.learnt_kind == kind for chain, kind in kept.items())
    assert learnt.behind.keys() <= kept.keys()
    assert not any(chain.lru_kept and chain not in lru.order for chain in there_is)
    assert not any(chain.learnt_kept and chain not in kept for chain in there_is)
    for queues in (policy._queues, learnt.queues):
        assert queues.least(policy._now_s) is _least(queues, policy._returns, policy._now_s)
    for before, branches in policy._branches.items():
        assert branches
        assert all(chain.before == before for chain in branches)
        parent = policy._known.get(before)
        if parent is not None and parent.stack and not parent.orphan:
            assert not any(chain.orphan for chain in branches)


class Requests:
    """Makes random requests that share beginnings, end, hint and fail. The requests' saves may land late."""

    def __init__(self, seed: int) -> None:
        """Start with a small pool."""
        self.draw = draw = random.Random(seed)
        self.now_s, slots = 0.0, draw.choice([6, 20, 60])
        self.policy = Sessions(slots)
        self.catalog = Catalog(slots, 2, self.policy, Counters(), clock=lambda: self.now_s)
        self.running: list[tuple[Owner, list[bytes], list[Piece]]] = []
        self.late: list[tuple[Piece, list[Hint]]] = []

    def begin(self, number: int) -> None:
        """Lease the held chunks, and save the others."""
        draw, catalog, owner = self.draw, self.catalog, Owner("r", number)
        keys = [f"{draw.randrange(3)}/{at}".encode() for at in range(draw.randint(1, 10))]
        keys = [keys[0][:1] + key[1:] for key in keys]
        if draw.random() < 0.5:
            keys += [keys[-1] + f"x{draw.randrange(3)}/{at}".encode() for at in range(draw.randint(1, 5))]
        pieces: list[Piece] = []
        for group in range(draw.randint(1, 2)):
            found = list(itertools.takewhile(catalog.index(group).__contains__, keys))
            catalog.lease(owner, [catalog.index(group)[key] for key in found])
            for at in range(len(found), len(keys)):
                if not catalog.known(group, keys[at]) and (chunk := catalog.reserve(group)):
                    before = keys[at - 1] if at else b""
                    pieces.append(catalog.write(chunk, 1, keys[at], keep=True, base=at, before=before))
        self.running.append((owner, keys, pieces))

    def chunks(self, keys: list[bytes]) -> Iterator[Chunk]:
        """Yield the held chunks of a prompt, the last chunk first."""
        return (chunk for key in reversed(keys) for group in (0, 1) if (chunk := self.catalog.find(group, key)))

    def end(self) -> None:
        """End a request: some of its saves land, some fail, and some land later. Perhaps give a hint afterwards."""
        draw, catalog = self.draw, self.catalog
        owner, keys, pieces = self.running.pop(draw.randrange(len(self.running)))
        late: list[Piece] = []
        ends: list[Callable[[Piece], object]] = [catalog.landed, catalog.landed, catalog.lost, late.append]
        for piece in pieces:
            ends[draw.choice([0, 0, 0, 1, 2, 3, 3])](piece)
        hints = [Hint(draw.choice([*Action]), self.now_s + draw.choice([0, 20, 1e7])) for _ in range(draw.randrange(3))]
        if draw.random() < 0.5:
            catalog.release(owner)
        catalog.refresh(self.chunks(keys))
        catalog.release(owner)
        for hint in hints:
            catalog.hint(self.chunks(keys), hint)
        self.late += [(piece, hints) for piece in late]

    def land(self) -> None:
        """Let a save land after its request has ended."""
        piece, hints = self.late.pop(self.draw.randrange(len(self.late)))
        self.catalog.landed(piece, over=self.draw.random() < 0.9)
        for hint in hints:
            self.catalog.hint([piece.chunk], hint)

    def move(self, number: int) -> None:
        """Make one random move."""
        draw = self.draw
        self.now_s += draw.choice([0, 0.01, 1, 10, 20000])
        what = draw.random()
        if what < 0.4:
            self.begin(number)
        elif what < 0.7 and self.running:
            self.end()
        elif what < 0.9 and self.late:
            self.land()
        elif what < 0.93:
            there = [chunk for _, keys, _ in self.running for chunk in self.chunks(keys)]
            self.catalog.evict(draw.choice(there)) if there else self.catalog.reset()


@pytest.mark.parametrize("seed", range(40))
def test_records_agree_after_any_moves(seed: int) -> None:
    """No move raises, and no evictable chunk is lost."""
    requests = Requests(seed)
    for number in range(300):
        requests.move(number)
        _consistent(requests.policy)
