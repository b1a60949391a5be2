"""Chooses between LRU and the learnt order, by the hits that each order would have had on the requests so far.

For each order, a *shadow* simulates how many chunks of each chain the pool would hold. The simulation of a request
takes as many steps as the request has chains. LRU evicts until the learnt order is proven to have more hits. After a
client's first hint, the learnt order evicts until LRU is proven to have more hits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, MutableMapping, Sequence
from typing import TYPE_CHECKING, Final

from kvpipe.cache.policy.large import Ordered, make_order, order
from kvpipe.cache.policy.queues import Queues
from kvpipe.cache.policy.returns import Returns

if TYPE_CHECKING:
    from kvpipe.cache.policy.chain import Chain

BEGINS: Final = ((2.0, 0.005), (1.0, 0.01), (0.5, 0.05))
"""Pairs (number of standard deviations, share of LRU's hits).

The learnt order evicts if, for any pair, its lead in hits exceeds both values.
"""
ENDS: Final = ((0.5, 0.002),)
DECAY: Final = 1 - 1 / 8192  # per request
DEPTH_MAX: Final = 64  # an eviction follows at most this many chains towards the end of a prompt


class _LruShadow:
    """A simulated pool in which LRU has always evicted. The pool holds `lru_kept` chunks of each chain."""

    def __init__(self, slots: int) -> None:
        self.slots, self.used = slots, 0
        self.order: Ordered[Chain, None] = order(slots)

    def kept(self, chain: Chain) -> int:
        return chain.lru_kept

    def put(self, chain: Chain, size: int) -> None:
        """Record that the chain was used now, and that the pool would hold `size` of its chunks."""
        if chain.lru_kept:
            self.order.move_to_end(chain)
        else:
            self.order[chain] = None
        self.used += size - chain.lru_kept
        chain.lru_kept = size

    def fit(self, now_s: float) -> None:
        """Evict until the pool holds no more chunks than it has slots."""
        del now_s
        over, waiting = self.used - self.slots, self.order
        while over > 0:
            chain = next(iter(waiting))
            size = chain.lru_kept
            if size > over:
                chain.lru_kept = size - over
                size = over
            else:
                chain.lru_kept = 0
                del waiting[chain]
            over -= size
            self.used -= size


class _LearntShadow:
    """A simulated pool in which the learnt order has always evicted.

    The pool holds `learnt_kept` chunks of each chain.
    """

    def __init__(self, slots: int, returns: Returns) -> None:
        self.slots, self.used = slots, 0
        self.queues = Queues(slots, returns)  # a chain is in the queue of the kind that it had when it was added
        # for each chain: the chain that followed in the last request
        self.behind: MutableMapping[Chain, Chain] = make_order(slots)

    def kept(self, chain: Chain) -> int:
        return chain.learnt_kept

    def put(self, chain: Chain, size: int) -> None:
        """Record that the chain was used now, and that the pool would hold `size` of its chunks."""
        if chain.learnt_kept:
            self.queues.drop(chain, chain.learnt_kind)
        self.used += size - chain.learnt_kept
        chain.learnt_kept, chain.learnt_kind = size, chain.kind
        self.queues.put(chain, chain.kind)

    def become(self, chain: Chain) -> None:
        """Move the chain to the queue of its kind, which a client's hint has changed."""
        if chain.learnt_kept:
            self.put(chain, chain.learnt_kept)

    def fit(self, now_s: float) -> None:
        """Evict until the pool holds no more chunks than it has slots."""
        behind = self.behind
        while self.used > self.slots:
            chain = self.queues.least(now_s)
            assert chain is not None  # noqa: S101  (every used chunk is in a queue)
            for _ in range(DEPTH_MAX):
                following = behind.get(chain)
                if following is None or not following.learnt_kept:
                    break
                chain = following
            size = chain.learnt_kept
            gone = min(size, self.used - self.slots)
            self.used -= gone
            chain.learnt_kept = size - gone
            if gone == size:
                self.queues.drop(chain, chain.learnt_kind)
                behind.pop(chain, None)


class Duel:
    """Decides whether LRU or the learnt order evicts."""

    def __init__(self, slots: int, returns: Returns) -> None:
        """Start with LRU. `slots` is the number of slots of the pool."""
        self.learnt = False
        """Whether the learnt order evicts."""
        self._lru, self._learnt = _LruShadow(slots), _LearntShadow(slots, returns)
        self.revalued = self._learnt.queues.changed
        """The set of kinds to compare again.

        A chain's `learnt_kind` is added when the chain's kind changes, and when the chain is used.
        """
        self._ahead = self._squares = self._hits = 0.0
        self._hinted = self._believed = False

    def sized(self, slots: int) -> None:
        """Set the number of usable slots to `slots`.

        If the shadows assumed too many slots, they would count hits of chunks that the pool cannot hold.
        """
        self._lru.slots = self._learnt.slots = slots

    def used(self, prompt: Sequence[tuple[Chain, int]], now_s: float) -> None:
        """Record the end of a request.

        `prompt` has pairs (chain, number of the chain's chunks that the request has used). The end of the prompt is
        first.
        """
        self._count(*_hits(prompt))
        self._use(prompt)
        if self._lru.used > self._lru.slots:
            self._lru.fit(now_s)
        if self._learnt.used > self._learnt.slots:
            self._learnt.fit(now_s)

    def _use(self, prompt: Sequence[tuple[Chain, int]]) -> None:
        """Put a prompt's chains into both shadows, the last chain first. So the last chain is evicted first."""
        lru, learnt, following = self._lru, self._learnt, None
        waiting, queues, changed = lru.order, learnt.queues.by_kind, learnt.queues.changed
        for chain, size in prompt:
            before, kind = chain.lru_kept, chain.kind
            if before:
                waiting.move_to_end(chain)
            else:
                waiting[chain] = None
            if before != size:
                there = size if before < size else max(size, min(before, len(chain.stack)))
                lru.used += there - before
                chain.lru_kept = there
            before = chain.learnt_kept
            if before:
                del queues[chain.learnt_kind][chain]
                changed.add(chain.learnt_kind)
            if before != size:
                there = size if before < size else max(size, min(before, len(chain.stack)))
                learnt.used += there - before
                chain.learnt_kept = there
            chain.learnt_kind = kind
            queues[kind][chain] = None
            changed.add(kind)
            if following is not None:
                learnt.behind[chain] = following
            following = chain

    def saved(self, chain: Chain, size: int, now_s: float) -> None:
        """Record that a save of a finished request has landed, so that the chain has `size` chunks now."""
        for shadow in (self._lru, self._learnt):
            shadow.put(chain, max(size, shadow.kept(chain)))
            shadow.fit(now_s)

    def split(self, chain: Chain, size: int, rest: Chain, rest_size: int) -> None:
        """Record that `chain` was cut after `size` chunks.

        The `rest_size` chunks after the cut are now the chain `rest`.
        """
        for shadow in (self._lru, self._learnt):
            behind = min(shadow.kept(chain) - size, rest_size)
            if behind > 0:
                shadow.put(chain, size)
                shadow.put(rest, behind)

    def hinted(self, chain: Chain) -> None:
        """Record a client's hint on a chain. After the first hint, the learnt order evicts."""
        if not self._hinted:
            self._hinted = self._believed = self.learnt = True
        self._learnt.become(chain)

    def _count(self, lru: int, learnt: int) -> None:
        ahead = learnt - lru
        self._ahead = DECAY * self._ahead + ahead
        self._squares = DECAY * self._squares + ahead * ahead
        self._hits = DECAY * self._hits + lru
        if self._believed:
            self._believed = not (self._leads(self._ahead, BEGINS) or self._leads(-self._ahead, BEGINS))
        self.learnt = self._believed or self._leads(self._ahead, ENDS if self.learnt else BEGINS)

    def _leads(self, by: float, levels: Iterable[tuple[float, float]]) -> bool:
        if by > 0:
            sigma = math.sqrt(self._squares)
            for sigmas, share in levels:
                if by > sigmas * sigma and by > share * self._hits:
                    return True
        return False


def _hits(prompt: Sequence[tuple[Chain, int]]) -> tuple[int, int]:
    """Return how many of a prompt's first chunks LRU would hold without a gap, and how many the learnt order."""
    whole = lru = learnt = 0  # chunks behind the first gap do not count, although a shadow may hold them
    lru_goes_on = learnt_goes_on = True
    for chain, size in reversed(prompt):
        whole += size
        if lru_goes_on:
            lru += chain.lru_kept
            lru_goes_on = lru >= whole
        if learnt_goes_on:
            learnt += chain.learnt_kept
            learnt_goes_on = learnt >= whole
    return whole if lru_goes_on else lru, whole if learnt_goes_on else learnt
