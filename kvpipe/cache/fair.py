"""Divides bounded memory fairly between tenants: the tenant with the largest sum of entries loses an entry first.

Tenants are distinguished by their salt. With quotas, the largest quota loses an entry, and within this quota the
largest salt. Therefore a client that invents salts takes nothing from a salt with a quota.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

if TYPE_CHECKING:
    from kvpipe.cache.tenants import Tenant

K = TypeVar("K", bound=Hashable)


class _Salt(Generic[K]):
    """The entries of one salt. `rows` has (rank, number, key) of each entry, sorted.

    `turn` is the number of the last call of `serve` for an entry of the salt.
    """

    __slots__ = ("amount", "number", "rows", "turn")

    def __init__(self, number: int, turn: int) -> None:
        self.number, self.turn, self.amount = number, turn, 0
        self.rows: list[tuple[float, int, K]] = []


class _FairAccount(Generic[K]):
    """The salts that share one account. `ranks` has (amount, -number, salt) of each salt, sorted."""

    __slots__ = ("amount", "ranks", "salts", "turn")

    def __init__(self, turn: int) -> None:
        self.turn, self.amount = turn, 0
        self.salts: dict[str, _Salt[K]] = {}
        self.ranks: list[tuple[int, int, _Salt[K]]] = []

    def change(self, salt: _Salt[K], amount: int) -> None:
        """Add `amount` to the amount of a salt and of the account."""
        if salt.amount:
            del self.ranks[bisect_left(self.ranks, (salt.amount, -salt.number))]
        salt.amount += amount
        self.amount += amount
        if salt.amount:
            insort(self.ranks, (salt.amount, -salt.number, salt))


class _FairEntry(NamedTuple):
    account: object
    salt: str
    rank: float
    number: int
    amount: int


class FairShares(Generic[K]):
    """The entries of one structure of bounded size, by tenant.

    `amount` is the sum of the amounts of all entries. A call takes time logarithmic in the number of entries. With
    quotas, a call also compares all quotas.
    """

    def __init__(self, account: Callable[[Tenant], object] = lambda _: None) -> None:
        """Start without entries. `account(tenant)` is explained in `Catalog.account_of`."""
        self._account = account
        self._accounts: dict[object, _FairAccount[K]] = {}
        self._entries: dict[K, _FairEntry] = {}
        self._numbers, self._turns = itertools.count(1), 0
        self.amount = 0

    def __len__(self) -> int:
        """Return the number of entries."""
        return len(self._entries)

    def put(self, key: K, tenant: Tenant, *, rank: float | None = None, amount: int = 1) -> None:
        """Add an entry of `tenant`. The new entry replaces an entry with the same key.

        `amount` is the size of the entry, at least 1. A salt loses its entry with the highest `rank` first. Without
        ranks, a salt loses its oldest entry first.
        """
        if key in self._entries:
            self.pop(key)
        number, name = next(self._numbers), self._account(tenant)
        account = self._accounts.get(name)
        if account is None:
            account = self._accounts[name] = _FairAccount(self._turns)
        salt = account.salts.get(tenant.salt)
        if salt is None:
            salt = account.salts[tenant.salt] = _Salt(number, self._turns)
        entry = self._entries[key] = _FairEntry(name, tenant.salt, -number if rank is None else rank, number, amount)
        insort(salt.rows, (entry.rank, number, key))
        account.change(salt, amount)
        self.amount += amount

    def pop(self, key: K) -> None:
        """Remove an entry. Raises KeyError if there is no entry with this key."""
        entry = self._entries.pop(key)
        account = self._accounts[entry.account]
        salt = account.salts[entry.salt]
        del salt.rows[bisect_left(salt.rows, (entry.rank, entry.number))]
        account.change(salt, -entry.amount)
        self.amount -= entry.amount
        if not salt.rows:
            del account.salts[entry.salt]
            if not account.salts:
                del self._accounts[entry.account]

    def most(self) -> K:
        """Return the key of the entry to remove: an entry of the largest salt in the largest account.

        If salts are equally large, the salt that has had entries for the longest time loses an entry. There must be at
        least one entry.
        """
        account = max(self._accounts.values(), key=lambda one: one.amount)
        return account.ranks[-1][2].rows[-1][2]

    def turn(self, key: K) -> tuple[int, int]:
        """Return a sort key of an entry. If several entries wait, the caller serves the entry with the lowest key."""
        entry = self._entries[key]
        account = self._accounts[entry.account]
        return account.turn, account.salts[entry.salt].turn

    def serve(self, key: K) -> None:
        """Record that the tenant of an entry is served now.

        All other waiting tenants are served before this tenant is served again.
        """
        entry = self._entries[key]
        account = self._accounts[entry.account]
        self._turns += 1
        account.turn = account.salts[entry.salt].turn = self._turns
