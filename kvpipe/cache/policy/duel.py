"""Chooses between LRU and the learnt order, by the hits that each would have had on the requests so far.

Both are simulated ("shadows"): how many chunks of each chain the pool would hold. That takes each request as many steps
as it has chains. LRU evicts until the learnt order is proven to hit more. From the first hint of a client on, the
learnt order evicts, until LRU is proven to hit more.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, MutableMapping, Sequence
from typing import TYPE_CHECKING, Final

from kvpipe.cache.large import Ordered, order, orders, table
from kvpipe.cache.policy.returns import INNER_S, KINDS, Returns

if TYPE_CHECKING:
    from kvpipe.cache.policy.chain import Chain

BEGINS: Final = ((2.0, 0.005), (1.0, 0.01), (0.5, 0.05))
"""(standard deviations of the difference in hits, share of LRU's hits): how far the learnt order has to be ahead."""
ENDS: Final = ((0.5, 0.002),)
DECAY: Final = 1 - 1 / 8192  # a request
DEPTH_MAX: Final = 64  # chains that follow each other and are evicted from their end
NOTHING: Final = (0, 0)  # is kept of a chain, of no kind


def least(queues: Iterable[Ordered[Chain, None]], returns: Returns, now_s: float) -> Chain | None:
    """Return the chain with the least worth now, or None. Of each kind only the oldest and the newest are compared."""
    worst, worth, used_s, worths = None, math.inf, 0.0, returns.worths
    some: Iterable[Ordered[Chain, None]] = filter(None, queues)
    for queue in some:
        first, last = next(iter(queue)), next(reversed(queue))
        at_s = first.used_s
        promise = worths[first.kind][bisect_right(INNER_S, now_s - at_s)]
        if promise < worth or (promise == worth and at_s < used_s):
            worst, worth, used_s = first, promise, at_s
        if last is not first:
            at_s = last.used_s
            promise = worths[last.kind][bisect_right(INNER_S, now_s - at_s)]
            if promise < worth or (promise == worth and at_s < used_s):
                worst, worth, used_s = last, promise, at_s
    return worst


class _LruShadow:
    """What the pool would hold if LRU had always evicted."""

    def __init__(self, slots: int) -> None:
        self._slots, self._used = slots, 0
        self._kept: Ordered[Chain, int] = order(slots)

    def kept(self, chain: Chain) -> int:
        return self._kept.get(chain, 0)

    def put(self, chain: Chain, size: int) -> None:
        """The pool holds `size` chunks of the chain, used now."""
        self._used += size - self._kept.pop(chain, 0)
        self._kept[chain] = size

    def use(self, prompt: Sequence[tuple[Chain, int]]) -> int:
        """Count a prompt's hits, and put it in."""
        kept, used = self._kept, self._used
        hits = _hits([kept.get(chain, 0) for chain, _ in prompt], prompt)
        for chain, size in reversed(prompt):  # what is used last goes last: ends before beginnings
            before = kept.pop(chain, 0)
            there = size if before <= size else max(size, min(before, len(chain.stack)))
            kept[chain] = there
            used += there - before
        self._used = used
        return hits

    def fit(self, now_s: float) -> None:
        """Evict until the pool is full."""
        del now_s
        kept, over = self._kept, self._used - self._slots
        while over > 0:
            chain = next(iter(kept))
            size = kept[chain]
            if size > over:
                kept[chain] = size - over
                size = over
            else:
                del kept[chain]
            over -= size
            self._used -= size


class _LearntShadow:
    """What the pool would hold if the learnt order had always evicted."""

    def __init__(self, slots: int, returns: Returns) -> None:
        self._slots, self._returns, self._used = slots, returns, 0
        self._kept: MutableMapping[Chain, tuple[int, int]] = table(slots)  # how many, and the kind
        self._queues: tuple[Ordered[Chain, None], ...] = orders(slots, KINDS)
        self._behind: MutableMapping[Chain, Chain] = table(slots)  # as the last request had them

    def kept(self, chain: Chain) -> int:
        return self._kept.get(chain, (0, 0))[0]

    def put(self, chain: Chain, size: int) -> None:
        """The pool holds `size` chunks of the chain, used now."""
        before, kind = self._kept.get(chain, (0, chain.kind))
        if before:
            del self._queues[kind][chain]
        self._used += size - before
        self._kept[chain] = size, chain.kind
        self._queues[chain.kind][chain] = None

    def use(self, prompt: Sequence[tuple[Chain, int]]) -> int:
        """Count a prompt's hits, and put it in."""
        kept, queues, following = self._kept, self._queues, None
        hits = _hits([kept.get(chain, NOTHING)[0] for chain, _ in prompt], prompt)
        for chain, size in reversed(prompt):  # as above
            before, kind = kept.get(chain, NOTHING)
            if before:
                del queues[kind][chain]
            there, kind = size if before <= size else max(size, min(before, len(chain.stack))), chain.kind
            kept[chain] = there, kind
            queues[kind][chain] = None
            self._used += there - before
            if following is not None:
                self._behind[chain] = following
            following = chain
        return hits

    def become(self, chain: Chain) -> None:
        """A client's hint has changed the chain's kind."""
        size = self.kept(chain)
        if size:
            self.put(chain, size)

    def fit(self, now_s: float) -> None:
        """Evict until the pool is full."""
        while self._used > self._slots:
            chain = least(self._queues, self._returns, now_s)
            assert chain is not None  # noqa: S101  (what is used is in a queue)
            for _ in range(DEPTH_MAX):
                following = self._behind.get(chain)
                if following is None or following not in self._kept:
                    break
                chain = following
            size, kind = self._kept[chain]
            gone = min(size, self._used - self._slots)
            self._used -= gone
            if gone < size:
                self._kept[chain] = size - gone, kind
                continue
            del self._kept[chain], self._queues[kind][chain]
            self._behind.pop(chain, None)


class Duel:
    """Decides which evicts: LRU, or the learnt order."""

    def __init__(self, slots: int, returns: Returns) -> None:
        """Start with LRU. `slots`: of the pool."""
        self.learnt = False
        """Whether the learnt order evicts."""
        self._lru, self._learnt = _LruShadow(slots), _LearntShadow(slots, returns)
        self._ahead = self._squares = self._hits = 0.0
        self._hinted = self._believed = False

    def used(self, prompt: Sequence[tuple[Chain, int]], now_s: float) -> None:
        """A request is over. `prompt`: (chain, how many chunks of it the request has used), its beginning first."""
        self._count(self._lru.use(prompt), self._learnt.use(prompt))
        self._lru.fit(now_s)
        self._learnt.fit(now_s)

    def saved(self, chain: Chain, size: int, now_s: float) -> None:
        """A save of a request that is over has landed: the chain has `size` chunks now."""
        for shadow in (self._lru, self._learnt):
            shadow.put(chain, max(size, shadow.kept(chain)))
            shadow.fit(now_s)

    def split(self, chain: Chain, size: int, rest: Chain, rest_size: int) -> None:
        """`chain` was cut after `size` chunks; the `rest_size` chunks behind are the chain `rest` now."""
        for shadow in (self._lru, self._learnt):
            behind = min(shadow.kept(chain) - size, rest_size)
            if behind > 0:
                shadow.put(chain, size)
                shadow.put(rest, behind)

    def hinted(self, chain: Chain) -> None:
        """A client has given a hint on a chain. The first hint makes the learnt order evict."""
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


def _hits(there: Iterable[int], prompt: Sequence[tuple[Chain, int]]) -> int:
    """Return how many of a prompt's chunks, from its beginning on, a pool with `there` chunks of each chain holds."""
    hits = whole = 0
    for kept, (_, size) in zip(there, prompt, strict=True):
        whole += size  # kept may be more: where a chain's end was lost, what follows it counts as its own
        hits += kept
        if hits < whole:
            return hits
    return whole
