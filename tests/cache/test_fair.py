"""Bounded memory is divided fairly between tenants."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from kvpipe.cache.fair import FairShares
from kvpipe.cache.tenants import ANYBODY, Tenant

ALICE, BOB, CAROL = Tenant("alice"), Tenant("bob"), Tenant("carol")


def test_the_salt_that_has_most_gives_up_its_oldest_entry() -> None:
    """The order in which the salts arrived does not matter."""
    shares = FairShares[str]()
    for key, tenant in (("a1", ALICE), ("b1", BOB), ("b2", BOB), ("n1", ANYBODY), ("a2", ALICE), ("b3", BOB)):
        shares.put(key, tenant)
    assert shares.most() == "b1"
    shares.pop("b1")
    shares.pop("b2")
    assert shares.most() == "a1"


def test_the_entry_with_the_highest_rank_is_given_up_first() -> None:
    """Among the entries of one salt, the highest rank is given up first."""
    shares = FairShares[str]()
    for key, rank in (("soon", 1.0), ("last", 9.0), ("later", 5.0)):
        shares.put(key, ALICE, rank=rank)
    assert shares.most() == "last"


def test_amounts_count_and_not_the_number_of_entries() -> None:
    """One large entry counts more than two small entries."""
    shares = FairShares[str]()
    shares.put("a1", ALICE, amount=1)
    shares.put("a2", ALICE, amount=1)
    shares.put("b1", BOB, amount=3)
    assert (shares.most(), shares.amount, len(shares)) == ("b1", 5, 3)


def test_an_entry_is_replaced_when_its_key_is_put_again() -> None:
    """The replaced entry counts once, as the youngest entry."""
    shares = FairShares[str]()
    for key in ("a1", "a2", "a1"):
        shares.put(key, ALICE)
    assert (shares.most(), shares.amount) == ("a2", 2)


def test_salts_without_a_quota_give_up_entries_first_when_they_have_most_together() -> None:
    """The number of entries of each single salt without a quota does not matter."""
    shares = FairShares[str](lambda tenant: tenant.salt == "alice")
    for key, tenant in (("a1", ALICE), ("a2", ALICE), ("b1", BOB), ("c1", CAROL), ("n1", ANYBODY)):
        shares.put(key, tenant)
    assert shares.most() == "b1"


def test_tenants_are_served_in_turn() -> None:
    """A later salt waits until each of the other salts was served once. A new salt is not served before older salts."""
    shares = FairShares[str]()
    for key, tenant in (("b1", BOB), ("b2", BOB), ("b3", BOB), ("a1", ALICE)):
        shares.put(key, tenant)
    served = []
    for _ in range(3):
        key = min((key for key in ("b1", "b2", "b3", "a1") if key not in served), key=shares.turn)
        shares.serve(key)
        served.append(key)
    assert served == ["b1", "a1", "b2"]
    shares.put("c1", CAROL)
    assert shares.turn("a1") < shares.turn("c1")


@pytest.mark.parametrize("seed", range(4))
def test_result_equals_that_of_a_plain_search_when_entries_are_added_and_removed(seed: int) -> None:
    """After all entries of a salt are removed, no data of the salt is kept."""
    draw, shares = random.Random(seed), FairShares[int](lambda tenant: tenant.salt[:1])
    tenants = [Tenant(f"{account}{salt}") for account in "xyz" for salt in range(3)]
    there: dict[int, tuple[Tenant, float, int]] = {}
    for key in range(500):
        if there and draw.random() < 0.45:
            gone = draw.choice([*there])
            shares.pop(gone)
            del there[gone]
        else:
            there[key] = draw.choice(tenants), draw.random(), draw.randrange(1, 9)
            shares.put(key, there[key][0], rank=there[key][1], amount=there[key][2])
        accounts, salts = Counter[str](), Counter[str]()
        for tenant, _, amount in there.values():
            accounts[tenant.salt[:1]] += amount
            salts[tenant.salt] += amount
        if there:
            loser = there[shares.most()][0].salt
            assert accounts[loser[:1]] == max(accounts.values())
            assert salts[loser] == max(amount for salt, amount in salts.items() if salt[0] == loser[0])
            assert there[shares.most()][1] == max(rank for tenant, rank, _ in there.values() if tenant.salt == loser)
        assert (shares.amount, len(shares)) == (sum(accounts.values()), len(there))
    for key in there:
        shares.pop(key)
    assert not shares._accounts
