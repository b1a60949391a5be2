"""The conformance suite of tiers finds bugs: each claim fails for a tier with the bug that the claim is about."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import anyio
import anyio.lowlevel
import pytest

from kvpipe.testing import waiting
from kvpipe.testing.dict_tier import DictTier
from kvpipe.testing.held_tier import DictSpec
from kvpipe.testing.tier_conformance import TierConformance, TierWorld
from kvpipe.testing.tier_conformance.values import SPLITS
from kvpipe.tiers.base import Capacity, Entry, Get, Key, Put, Read, TierError, Written
from tests.tiers.test_whole_tier import FAILED_BY_WHOLE_TIERS

SUITE = TierConformance()


class FlipsABit(DictTier):
    """A tier that flips a bit in the last part of a value."""

    def _read(self, get: Get) -> Read:
        read = super()._read(get)
        get.into[-1][-1] ^= 1
        return read


class IgnoresLengths(DictTier):
    """A tier that ignores lengths when it reads."""

    def _read(self, get: Get) -> Read:
        value = self.values.get(get.key.text)
        if value is None:
            return Read.MISS
        whole = value.ljust(get.size, b"\0")
        for i, part in enumerate(get.into):
            at = sum(one.nbytes for one in get.into[:i])
            part[:] = whole[at : at + part.nbytes]
        return Read.HIT


class MissesAreDamage(DictTier):
    """A tier that reports a missing value as damaged."""

    def _read(self, get: Get) -> Read:
        return Read.DAMAGED if super()._read(get) is Read.MISS else Read.HIT


class HitsFirst(DictTier):
    """A tier that returns results in another order than the keys."""

    async def read(self, gets: Sequence[Get]) -> list[Read]:
        """Read, and return the results with all hits first."""
        return sorted(await super().read(gets), key=lambda read: read is not Read.HIT)


class KeepsTheLast(DictTier):
    """A tier in which a second value replaces the first."""

    async def write(self, puts: Sequence[Put]) -> list[Written]:
        """Write, replacing the old value."""
        ends = await super().write(puts)
        self.values.update({put.key.text: b"".join(put.parts) for put in puts})
        return ends


class CountsWhatWasAsked(DictTier):
    """A tier that also counts missing values as deleted."""

    async def delete(self, keys: Sequence[Key]) -> int:
        """Delete, and count every key."""
        await super().delete(keys)
        return len(keys)


class OnePage(DictTier):
    """A tier that looks up at most a thousand keys."""

    async def exists(self, keys: Sequence[Key]) -> list[bool]:
        """Look up the first thousand keys."""
        return await super().exists(keys[:1000]) + [False] * len(keys[1000:])


class Alone(DictTier):
    """A tier whose clients do not see each other's values."""

    async def open(self) -> None:
        """Begin with an empty store."""
        self.values = {}


class ForgetsAtClose(DictTier):
    """A tier whose values are lost when it is closed."""

    async def close(self) -> None:
        """Clear the store."""
        self.values.clear()


class ListsOnePage(DictTier):
    """A tier whose listing ends too early."""

    async def scan(self) -> AsyncIterator[Entry]:
        """List one page."""
        for name, value in list(self.values.items())[:30]:
            yield Entry(Key.parse(name), len(value), None)


class ListsByPlace(DictTier):
    """A tier whose listing continues at an entry's number, which changes when values are added or deleted."""

    async def scan(self) -> AsyncIterator[Entry]:
        """List by number."""
        place = 0
        while place < len(self.values):
            name, value = sorted(self.values.items())[place]
            yield Entry(Key.parse(name), len(value), None)
            place += 1


class OneAtATime(DictTier):
    """A tier with one place for the arguments of all its calls."""

    async def read(self, gets: Sequence[Get]) -> list[Read]:
        """Read the keys of the last call."""
        self._gets = gets
        await anyio.lowlevel.checkpoint()
        return [self._read(get) for get in self._gets]


class Torn(DictTier):
    """A tier that writes one part after another, so that other clients see an incomplete value."""

    async def write(self, puts: Sequence[Put]) -> list[Written]:
        """Write part after part."""
        for put in puts:
            for i, part in enumerate(put.parts):
                held = self.values.get(put.key.text, b"") if i else b""
                self.values[put.key.text] = held + bytes(part)
                await anyio.lowlevel.checkpoint()
        return [Written.STORED] * len(puts)


class FillsLate(DictTier):
    """A tier that fills the buffers once more after the call has returned."""

    async def read(self, gets: Sequence[Get]) -> list[Read]:
        """Read, and read again later."""
        for get in gets:
            asyncio.get_running_loop().call_later(0.01, self._read, get)
        return await super().read(gets)


class KeepsBuffers(DictTier):
    """A tier that reads the buffers after the call has returned."""

    def _keep(self, puts: Sequence[Put]) -> None:
        self.values.update({put.key.text: b"".join(put.parts) for put in puts})

    async def write(self, puts: Sequence[Put]) -> list[Written]:
        """Write, and write again later."""
        asyncio.get_running_loop().call_later(0.01, self._keep, puts)
        return await super().write(puts)


class ClosesOnce(DictTier):
    """A tier whose second close fails."""

    closed = False

    async def close(self) -> None:
        """Close, and fail the second time."""
        assert not self.closed
        self.closed = True


class Sleeps(DictTier):
    """A tier that blocks the loop's thread for a short time."""

    def _read(self, get: Get) -> Read:
        time.sleep(1e-6)
        return super()._read(get)


class NeverWell(DictTier):
    """A tier that is never healthy, though its store can be used."""

    async def health(self) -> None:
        """Report a failure."""
        raise TierError("unwell")


class CountsNothing(DictTier):
    """A tier that reports no content."""

    async def capacity(self) -> Capacity:
        """Return an empty capacity."""
        return Capacity(0, 0, None)


class NeedsAKey(DictTier):
    """A tier that fails if it is called without keys."""

    async def delete(self, keys: Sequence[Key]) -> int:
        """Delete, and fail without keys."""
        return await super().delete(keys) or 1 - bool(keys)


class ForgetsTheRank(DictTier):
    """A tier in which ranks share a value."""

    async def write(self, puts: Sequence[Put]) -> list[Written]:
        """Write as if there was only one rank."""
        return await super().write([Put(put.key._replace(rank=0, ranks=1), put.parts) for put in puts])

    def _read(self, get: Get) -> Read:
        return super()._read(Get(get.key._replace(rank=0, ranks=1), get.into))


class LeavesThreads(DictTier):
    """A tier that leaves a thread for every client."""

    async def open(self) -> None:
        """Start the thread."""
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()


@dataclass
class Store:
    """One dictionary, which all clients share."""

    client: type[DictTier]
    values: dict[str, bytes] = field(default_factory=dict)

    def make(self) -> DictTier:
        """Return a new client."""
        made = self.client()
        made.values = self.values
        return made


Claim = Callable[[TierWorld], None]
BUGS: list[tuple[str, Claim, type[DictTier]]] = [
    *(
        (f"{claim.__name__} of {split}", partial(claim, split=split), FlipsABit)
        for claim in (SUITE.test_what_was_written_is_read_back,)
        for split in SPLITS
    ),
    ("test_another_length_is_damage", SUITE.test_another_length_is_damage, IgnoresLengths),
    ("test_what_was_not_written_is_a_miss", SUITE.test_what_was_not_written_is_a_miss, MissesAreDamage),
    ("test_a_batch_keeps_its_order", SUITE.test_a_batch_keeps_its_order, HitsFirst),
    ("test_the_first_value_is_kept", SUITE.test_the_first_value_is_kept, KeepsTheLast),
    ("test_delete_counts_and_makes_a_miss", SUITE.test_delete_counts_and_makes_a_miss, CountsWhatWasAsked),
    ("test_exists_agrees_with_read", SUITE.test_exists_agrees_with_read, OnePage),
    ("test_another_client_finds_it", SUITE.test_another_client_finds_it, Alone),
    ("test_it_is_still_there_after_reopening", SUITE.test_it_is_still_there_after_reopening, ForgetsAtClose),
    ("test_scan_lists_all", SUITE.test_scan_lists_all, ListsOnePage),
    ("test_a_scan_runs_beside_writes", SUITE.test_a_scan_runs_beside_writes, ListsByPlace),
    ("test_many_at_once", SUITE.test_many_at_once, OneAtATime),
    ("test_two_writers_of_one_key_leave_one_value", SUITE.test_two_writers_of_one_key_leave_one_value, Torn),
    ("test_a_read_gives_its_buffers_back", SUITE.test_a_read_gives_its_buffers_back, FillsLate),
    ("test_a_write_gives_its_buffers_back", SUITE.test_a_write_gives_its_buffers_back, KeepsBuffers),
    ("test_close_is_idempotent_and_open_follows", SUITE.test_close_is_idempotent_and_open_follows, ClosesOnce),
    ("test_a_closed_tier_raises_at_once", SUITE.test_a_closed_tier_raises_at_once, DictTier),
    ("test_the_loop_is_not_held_up", SUITE.test_the_loop_is_not_held_up, Sleeps),
    ("test_health_returns", SUITE.test_health_returns, NeverWell),
    ("test_capacity_counts", SUITE.test_capacity_counts, CountsNothing),
    ("test_nothing_may_be_asked", SUITE.test_nothing_may_be_asked, NeedsAKey),
    ("test_keys_do_not_meet", SUITE.test_keys_do_not_meet, ForgetsTheRank),
    ("test_nothing_is_left_after_close", SUITE.test_nothing_is_left_after_close, LeavesThreads),
]


@pytest.mark.parametrize(("claim", "bug"), [bug[1:] for bug in BUGS], ids=[name for name, *_ in BUGS])
def test_a_claim_can_fail(claim: Claim, bug: type[DictTier], monkeypatch: pytest.MonkeyPatch) -> None:
    """A tier with one bug fails the claim. The same tier without the bug passes in `test_conformance.py`."""
    # some bugs make calls hang, and the suite waits this long for them
    monkeypatch.setattr(waiting, "EVENTUALLY_S", 0.5)
    with pytest.raises((AssertionError, TierError, pytest.fail.Exception)):
        claim(TierWorld(Store(bug).make, DictSpec.model_validate({})))


@pytest.mark.parametrize("claim", [SUITE.test_the_bound_holds, SUITE.test_a_broken_store_raises_tier_errors])
def test_undeclared_limit_of_a_world_fails_its_claim(claim: Claim) -> None:
    """A world must declare in `limits` if its store has no bound, or if tests cannot break the store."""
    with pytest.raises(pytest.fail.Exception, match=r"TierWorld\.limits|to its limits"):
        claim(TierWorld(Store(DictTier).make, DictSpec.model_validate({})))


def test_every_claim_is_tried() -> None:
    """The list above has a tier with a bug for every claim."""
    tried = {name.partition(" ")[0] for name, *_ in BUGS} | FAILED_BY_WHOLE_TIERS
    assert tried == {name for name in dir(SUITE) if name.startswith("test_")}
