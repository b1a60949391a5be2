"""The suite of tiers finds every bug that its claims are about: each claim fails for a tier that breaks it."""

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

from kvpipe.testing import tier_conformance, waiting
from kvpipe.testing.dict_tier import DictTier
from kvpipe.testing.held_tier import DictSpec
from kvpipe.testing.tier_conformance import TierConformance, TierWorld
from kvpipe.tiers.base import Capacity, Entry, Get, Key, Put, Read, TierError, Written

SUITE = TierConformance()


class FlipsABit(DictTier):
    """In the last part."""

    def _read(self, get: Get) -> Read:
        read = super()._read(get)
        get.into[-1][-1] ^= 1
        return read


class IgnoresLengths(DictTier):
    """Reads what there is, or as much as is wanted."""

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
    """What is not there is reported as damaged."""

    def _read(self, get: Get) -> Read:
        return Read.DAMAGED if super()._read(get) is Read.MISS else Read.HIT


class HitsFirst(DictTier):
    """Answers come in an order of its own."""

    async def read(self, gets: Sequence[Get]) -> list[Read]:
        """Read."""
        return sorted(await super().read(gets), key=lambda read: read is not Read.HIT)


class KeepsTheLast(DictTier):
    """A second value takes the place of the first."""

    async def write(self, puts: Sequence[Put]) -> list[Written]:
        """Write."""
        ends = await super().write(puts)
        self.values.update({put.key.text: b"".join(put.parts) for put in puts})
        return ends


class CountsWhatWasAsked(DictTier):
    """Deleting counts what was not there, too."""

    async def delete(self, keys: Sequence[Key]) -> int:
        """Delete."""
        await super().delete(keys)
        return len(keys)


class OnePage(DictTier):
    """Looks for a thousand keys at most."""

    async def exists(self, keys: Sequence[Key]) -> list[bool]:
        """Look."""
        return await super().exists(keys[:1000]) + [False] * len(keys[1000:])


class Alone(DictTier):
    """No client sees what others write."""

    async def open(self) -> None:
        """Begin empty."""
        self.values = {}


class ForgetsAtClose(DictTier):
    """Nothing outlives it."""

    async def close(self) -> None:
        """Clear."""
        self.values.clear()


class ListsOnePage(DictTier):
    """A listing ends too early."""

    async def scan(self) -> AsyncIterator[Entry]:
        """List."""
        for name, value in list(self.values.items())[:30]:
            yield Entry(Key.parse(name), len(value), None)


class ListsByPlace(DictTier):
    """Every entry is looked up by its number, which changes when values come and go."""

    async def scan(self) -> AsyncIterator[Entry]:
        """List."""
        place = 0
        while place < len(self.values):
            name, value = sorted(self.values.items())[place]
            yield Entry(Key.parse(name), len(value), None)
            place += 1


class OneAtATime(DictTier):
    """Calls share what was asked."""

    async def read(self, gets: Sequence[Get]) -> list[Read]:
        """Read what was asked last."""
        self._gets = gets
        await anyio.lowlevel.checkpoint()
        return [self._read(get) for get in self._gets]


class Torn(DictTier):
    """Writes part after part, under the eyes and hands of others."""

    async def write(self, puts: Sequence[Put]) -> list[Written]:
        """Write."""
        for put in puts:
            for i, part in enumerate(put.parts):
                held = self.values.get(put.key.text, b"") if i else b""
                self.values[put.key.text] = held + bytes(part)
                await anyio.lowlevel.checkpoint()
        return [Written.STORED] * len(puts)


class FillsLate(DictTier):
    """Buffers are filled once more when the call is over."""

    async def read(self, gets: Sequence[Get]) -> list[Read]:
        """Read, and again later."""
        for get in gets:
            asyncio.get_running_loop().call_later(0.01, self._read, get)
        return await super().read(gets)


class KeepsBuffers(DictTier):
    """Buffers are read when the call is over."""

    def _keep(self, puts: Sequence[Put]) -> None:
        self.values.update({put.key.text: b"".join(put.parts) for put in puts})

    async def write(self, puts: Sequence[Put]) -> list[Written]:
        """Write, and again later."""
        asyncio.get_running_loop().call_later(0.01, self._keep, puts)
        return await super().write(puts)


class ClosesOnce(DictTier):
    """A second time it fails."""

    closed = False

    async def close(self) -> None:
        """Close."""
        assert not self.closed
        self.closed = True


class Sleeps(DictTier):
    """On the loop's thread, however short."""

    def _read(self, get: Get) -> Read:
        time.sleep(1e-6)
        return super()._read(get)


class NeverWell(DictTier):
    """Its store can be used."""

    async def health(self) -> None:
        """Deny it."""
        raise TierError("unwell")


class CountsNothing(DictTier):
    """It does not know what it holds, and answers that it is nothing."""

    async def capacity(self) -> Capacity:
        """Return nothing."""
        return Capacity(0, 0, None)


class NeedsAKey(DictTier):
    """Cannot be asked for nothing."""

    async def delete(self, keys: Sequence[Key]) -> int:
        """Delete."""
        return await super().delete(keys) or 1 - bool(keys)


class ForgetsTheRank(DictTier):
    """Ranks share a value."""

    async def write(self, puts: Sequence[Put]) -> list[Written]:
        """Write as if there was one rank."""
        return await super().write([Put(put.key._replace(rank=0, ranks=1), put.parts) for put in puts])

    def _read(self, get: Get) -> Read:
        return super()._read(Get(get.key._replace(rank=0, ranks=1), get.into))


class LeavesThreads(DictTier):
    """One for every client."""

    async def open(self) -> None:
        """Start it."""
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
        for split in tier_conformance.SPLITS
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
    """For a tier with one bug. The same without it passes: `test_conformance.py` has it."""
    monkeypatch.setattr(waiting, "EVENTUALLY_S", 0.5)  # what never ends is waited for
    with pytest.raises((AssertionError, TierError, pytest.fail.Exception)):
        claim(TierWorld(Store(bug).make, DictSpec.model_validate({})))


def test_every_claim_is_tried() -> None:
    """None is left out above."""
    assert {name.partition(" ")[0] for name, *_ in BUGS} == {name for name in dir(SUITE) if name.startswith("test_")}
