"""Chains in the order of their last use. If a chain is split, its two parts are neighbours in this order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvpipe.cache.policy.large import Ordered, order, untracked

if TYPE_CHECKING:
    from kvpipe.cache.policy.chain import Chain

RUN_MAX: Final = 16  # the number of chains per run; splits make a run longer


class Recency:
    """An ordered set of chains, in numbered runs, so that a chain can be inserted before any other chain."""

    def __init__(self, slots: int) -> None:
        """Start without chains. `slots` is the largest number of chains."""
        self._runs: Ordered[int, list[Chain]] = order(slots)  # no run is empty
        self._number = 0
        self._last: list[Chain] = []

    def use(self, chain: Chain) -> None:
        """Add `chain`, which must not be in the set, as the most recently used chain."""
        if not self._last or len(self._last) >= RUN_MAX:
            self._number += 1
            self._last = self._runs[self._number] = []
            untracked(self._last)
        self._last.append(chain)
        chain.run = self._number

    def forget(self, chain: Chain) -> None:
        """Remove `chain`, which must be in the set."""
        run = self._runs[chain.run]
        run.remove(chain)
        if not run:
            del self._runs[chain.run]

    def renew(self, chain: Chain) -> None:
        """Make `chain`, which must be in the set, the most recently used chain."""
        if not self._last or self._last[-1] is not chain:
            self.forget(chain)
            self.use(chain)

    def split(self, chain: Chain, rest: Chain) -> None:
        """Add `rest`, which was split off the end of `chain`, directly before `chain`."""
        run = self._runs[chain.run]
        run.insert(run.index(chain), rest)
        rest.run = chain.run

    def first(self) -> Chain:
        """Return the least recently used chain. Raises StopIteration if the set is empty."""
        return self._runs[next(iter(self._runs))][0]
