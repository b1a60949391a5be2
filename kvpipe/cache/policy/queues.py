"""Queues of chains, one queue per kind, and the chain that is worth the least."""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import TYPE_CHECKING, Final, TypeAlias

from kvpipe.cache.policy.large import Ordered, orders
from kvpipe.cache.policy.returns import INNER_S, KINDS, Returns

if TYPE_CHECKING:
    from kvpipe.cache.policy.chain import Chain

_LEAVES_S: Final = (*INNER_S, math.inf)
"""The end of each bin of idle time, in seconds."""
Candidate: TypeAlias = "tuple[float, float, int, Chain, float]"
"""The chain with the lowest worth of its kind: (worth, time of last use, kind, chain, end of the worth's validity)."""
_EARLY: Final = 1 - 1e-12  # with this factor, rounding errors make a worth expire slightly too early, never too late


class Queues:
    """Queues of chains, one per kind. Only the oldest and the newest chain of each kind are compared.

    The result of a comparison is kept while it is valid. Code that changes the kind of a chain, or the time of its last
    use, must add the kind of the chain's queue to `changed`.
    """

    def __init__(self, slots: int, returns: Returns) -> None:
        """Start without chains. `slots` is the largest number of chains. `returns` has the worths of chains."""
        lines: tuple[Ordered[Chain, None], ...] = orders(slots, KINDS + 1)  # each chain is in one of these queues
        self.by_kind, self.others = lines[:-1], lines[-1]
        """Queues by kind, and the queue of chains that are not compared."""
        self.changed: set[int] = set()
        """The kinds whose chains must be compared again."""
        self._returns, self._renewals = returns, returns.renewals
        self._candidates: dict[int, Candidate] = {}
        self._least: Candidate | None = None
        self._until_s = math.inf  # the time until which `_least` is valid unless other data changes

    def put(self, chain: Chain, kind: int) -> None:
        """Add `chain` as the newest chain of `kind`. A chain that is already in the kind's queue keeps its position."""
        self.by_kind[kind][chain] = None
        self.changed.add(kind)

    def drop(self, chain: Chain, kind: int) -> None:
        """Remove `chain` from the queue of its kind."""
        del self.by_kind[kind][chain]
        self.changed.add(kind)

    def move(self, chain: Chain, kind: int, to: int) -> None:
        """Move `chain` from the queue of `kind` to the end of the queue of kind `to`."""
        del self.by_kind[kind][chain]
        self.by_kind[to][chain] = None
        self.changed.add(kind)
        self.changed.add(to)

    def least(self, now_s: float) -> Chain | None:
        """Return the chain with the lowest worth now, or None if there are no chains.

        If several chains have this worth, return the least recently used chain.
        """
        changed, candidates = self.changed, self._candidates
        if self._returns.renewals != self._renewals:
            self._renewals, self._until_s = self._returns.renewals, math.inf
            changed.update(candidates)
        elif now_s >= self._until_s:
            self._until_s = math.inf
            for kind, (_, _, _, _, until_s) in candidates.items():
                if now_s >= until_s:
                    changed.add(kind)
                elif until_s < self._until_s:
                    self._until_s = until_s
        if changed:
            self._compare(now_s)
        return self._least[3] if self._least is not None else None

    def _compare(self, now_s: float) -> None:
        """Compare the oldest and the newest chain of each changed kind. Then compare the results of all kinds."""
        changed, candidates, least, tables = self.changed, self._candidates, self._least, self._returns.tables
        if least is not None and least[2] in changed:
            least = None
        for kind in changed:
            queue = self.by_kind[kind]
            if not queue:
                candidates.pop(kind, None)
                continue
            chain, last = next(iter(queue)), next(reversed(queue))
            table, used_s = tables[chain.kind], chain.used_s
            at = bisect_right(INNER_S, now_s - used_s)
            worth, until_s = (table.computed or table.worths())[at], used_s + _LEAVES_S[at]
            if last is not chain:
                table, last_s = tables[last.kind], last.used_s
                at = bisect_right(INNER_S, now_s - last_s)
                other, leaves_s = (table.computed or table.worths())[at], last_s + _LEAVES_S[at]
                if leaves_s < until_s:  # noqa: PLR1730  (faster)
                    until_s = leaves_s
                if other < worth or (other == worth and last_s < used_s):
                    chain, worth, used_s = last, other, last_s
            until_s *= _EARLY
            if until_s < self._until_s:  # noqa: PLR1730  (as above)
                self._until_s = until_s
            mine = candidates[kind] = worth, used_s, kind, chain, until_s
            if least is not None and mine < least:
                least = mine
        changed.clear()
        self._least = least or min(candidates.values(), default=None)
