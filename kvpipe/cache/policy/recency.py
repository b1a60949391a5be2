"""Chains in the order of their last use. What is split off one was used when that was, until it is used again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvpipe.cache.large import Ordered, order, untracked

if TYPE_CHECKING:
    from kvpipe.cache.policy.sessions import Chain

RUN_MAX: Final = 16  # chains; splits make a run longer


class Recency:
    """Runs of chains, each at its number, so that a chain can be put in front of any other."""

    def __init__(self, slots: int) -> None:
        """Empty. `slots`: at most as many chains are in it."""
        self._runs: Ordered[int, list[Chain]] = order(slots)  # none is empty
        self._number = 0
        self._last: list[Chain] = []

    def use(self, chain: Chain) -> None:
        """It is used now. It is not in it yet."""
        if not self._last or len(self._last) >= RUN_MAX:
            self._number += 1
            self._last = self._runs[self._number] = []
            untracked(self._last)
        self._last.append(chain)
        chain.run = self._number

    def forget(self, chain: Chain) -> None:
        """Take it out."""
        run = self._runs[chain.run]
        run.remove(chain)
        if not run:
            del self._runs[chain.run]

    def split(self, chain: Chain, rest: Chain) -> None:
        """`rest` was the end of `chain`, and used with it."""
        run = self._runs[chain.run]
        run.insert(run.index(chain), rest)
        rest.run = chain.run

    def first(self) -> Chain:
        """Return what was used longest ago. Raises StopIteration: there is nothing."""
        return self._runs[next(iter(self._runs))][0]
