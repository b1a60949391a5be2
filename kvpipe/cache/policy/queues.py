"""Chains in queues, one per kind, and which of them is worth the least."""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import TYPE_CHECKING, Final

from kvpipe.cache.large import Ordered, orders
from kvpipe.cache.policy.returns import INNER_S, KINDS, Returns

if TYPE_CHECKING:
    from kvpipe.cache.policy.chain import Chain

_LEAVES_S: Final = (*INNER_S, math.inf)
"""By bin of idle time: from when on it is another one, in seconds."""
_EARLY: Final = 1 - 1e-12  # a bin is looked up again a little too early rather than too late


class Queues:
    """Of each kind the oldest and the newest chain are compared. What came of it is kept for as long as it holds.

    Who changes the kind of a chain, or when it was used, adds the kind of its queue to `changed`.
    """

    def __init__(self, slots: int, returns: Returns) -> None:
        """Start empty. `slots`: the largest number of chains in it. `returns`: what chains are worth."""
        lines: tuple[Ordered[Chain, None], ...] = orders(slots, KINDS + 1)  # a chain is in one of them
        self.by_kind, self.others = lines[:-1], lines[-1]
        """By kind, and of chains that are not compared."""
        self.changed: set[int] = set()
        """The kinds whose chains are to be compared again."""
        self._returns, self._renewals = returns, returns.renewals
        self._least: Chain | None = None
        self._until_s = math.inf  # for so long it stays that if nothing else changes
        self._candidates: dict[int, tuple[float, float, int, Chain]] = {}  # worth, last use, kind
        self._untils_s: dict[int, float] = {}

    def put(self, chain: Chain, kind: int) -> None:
        """Add `chain` as the newest of a kind, or leave it where it is."""
        self.by_kind[kind][chain] = None
        self.changed.add(kind)

    def drop(self, chain: Chain, kind: int) -> None:
        """Remove `chain` from a kind that has it."""
        del self.by_kind[kind][chain]
        self.changed.add(kind)

    def least(self, now_s: float) -> Chain | None:
        """Return the chain that is worth the least now, of equals the one used first; None if there is none."""
        changed, renewals = self.changed, self._returns.renewals
        if renewals != self._renewals:
            self._renewals = renewals
            changed.update(self._candidates)
        elif now_s >= self._until_s:
            changed.update([kind for kind, until_s in self._untils_s.items() if now_s >= until_s])
        if changed:
            for kind in changed:
                self._compare(kind, now_s)
            changed.clear()
            if self._candidates:
                self._until_s, self._least = min(self._untils_s.values()), min(self._candidates.values())[3]
            else:
                self._until_s, self._least = math.inf, None
        return self._least

    def _compare(self, kind: int, now_s: float) -> None:
        """Compare the oldest and the newest of a kind."""
        queue = self.by_kind[kind]
        if not queue:
            self._candidates.pop(kind, None)
            self._untils_s.pop(kind, None)
            return
        tables, chain, last = self._returns.tables, next(iter(queue)), next(reversed(queue))
        used_s = chain.used_s
        at = bisect_right(INNER_S, now_s - used_s)
        worth, until_s = tables[chain.kind].worths()[at], used_s + _LEAVES_S[at]
        if last is not chain:
            last_s = last.used_s
            at = bisect_right(INNER_S, now_s - last_s)
            other, leaves_s = tables[last.kind].worths()[at], last_s + _LEAVES_S[at]
            if leaves_s < until_s:  # noqa: PLR1730  (quicker)
                until_s = leaves_s
            if other < worth or (other == worth and last_s < used_s):
                chain, worth, used_s = last, other, last_s
        self._candidates[kind] = worth, used_s, kind, chain
        self._untils_s[kind] = until_s * _EARLY
