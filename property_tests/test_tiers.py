"""Tiers are compared with a dictionary, while two clients make concurrent calls, some cancelled, late or failing.

A fault may cause a miss or an error. A fault never gives wrong bytes, and never writes to a buffer after the call has
returned. No value disappears, because these stores have room.
"""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import anyio
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from kvpipe.testing.buffers import aligned, content, filled, some_key
from kvpipe.testing.faulty_tier import FaultyTier, TierFault, seeded
from kvpipe.testing.tier_conformance import TierWorld
from kvpipe.testing.waiting import WAIT_S
from kvpipe.tiers.base import Capacity, Entry, Get, Key, Put, Read, Tier, TierError, Written
from kvpipe.tiers.envelope import DamagedError, Sealer
from property_tests.profiles import examples
from tests.rigs.tier_worlds import WORLDS

CHEAP = ("dict", "disk", "valkey")
KEYS = 4
BODY_BYTES = (4096, 3 * 4096)  # a value's seed chooses one of these
CLIENTS = 2
HANG_S = 0.05
FILLING = 0xA5
CHANCES = {
    TierFault.LATE: 0.05,
    TierFault.ERROR: 0.05,
    TierFault.LOST: 0.05,
    TierFault.FULL: 0.05,
    TierFault.MISS: 0.05,
    TierFault.FLIP: 0.05,
}
SEALER = Sealer()
LATE = {"disk"}
"""Kinds whose clients remember lookups, so that `exists` sees the calls of another client only after some time."""

Held = bytes | None
"""The possible content of a key: a whole value, or None if the key has no value."""


class Step(NamedTuple):
    """A call by a client.

    The call is cancelled after `cancel_s` seconds; None: never. `fault` is the fault that the call meets, or None.
    """

    what: str
    client: int
    keys: tuple[int, ...]
    seed: int
    cancel_s: float | None
    fault: TierFault | None


STEPS = st.builds(
    Step,
    st.sampled_from(["write", "read", "exists", "delete", "scan", "capacity", "reopen", "write", "read", "health"]),
    st.integers(0, CLIENTS - 1),
    st.lists(st.integers(0, KEYS - 1), min_size=1, max_size=4, unique=True).map(tuple),
    st.integers(0, len(BODY_BYTES) - 1),
    st.none() | st.none() | st.sampled_from([0.0, 0.0003, 0.001, 0.003]),
    st.none() | st.none() | st.sampled_from(list(TierFault)),
)


def one_owner(steps: list[Step]) -> bool:
    """Return whether each `reopen` is the only step on its client in this round, and is not cancelled."""
    owned = [step for step in steps if step.what == "reopen"]
    users = [step.client for step in steps]
    return all(users.count(step.client) == 1 and step.cancel_s is None for step in owned)


ROUNDS = st.lists(st.lists(STEPS, min_size=1, max_size=3).filter(one_owner), min_size=1, max_size=12)


class Model:
    """The possible values of each key in one namespace, and the returned buffers, which no call may write any more."""

    def __init__(self, namespace: str) -> None:
        """Start with an empty namespace."""
        self.keys = [some_key(i, namespace=namespace) for i in range(KEYS)]
        self.values = {(key, seed): b"".join(self.whole(key, seed)) for key in range(KEYS) for seed in (0, 1)}
        self.may: list[set[Held]] = [{None} for _ in range(KEYS)]
        self.given_back: list[memoryview] = []

    def whole(self, key: int, seed: int) -> tuple[memoryview, ...]:
        """Return header and body of the value that a seed gives under a key."""
        (body,) = filled(content(100 * key + seed, BODY_BYTES[seed]), (BODY_BYTES[seed],))
        return SEALER.seal(self.keys[key], 1, body)

    def take_back(self, parts: tuple[memoryview, ...]) -> None:
        """Overwrite the buffers of a call that has returned. The call may have failed."""
        for part in parts:
            part[:] = bytes([FILLING]) * part.nbytes
        self.given_back += parts

    def untouched(self) -> bool:
        """Whether all returned buffers still have the content that `take_back` wrote."""
        return all(bytes(part) == bytes([FILLING]) * part.nbytes for part in self.given_back)

    def widen(self, steps: list[Step]) -> None:
        """Allow every result that concurrent or failing calls can have."""
        for key in range(KEYS):
            mine = [step for step in steps if key in step.keys]
            if any(step.what == "delete" for step in mine):
                self.may[key].add(None)
            if None in self.may[key]:
                self.may[key] |= {self.values[key, step.seed] for step in mine if step.what == "write"}

    def see(self, key: int, ends: set[Held], *, alone: bool) -> None:
        """Record that a call has seen one of the contents `ends`. At least one of these contents must be possible.

        If the call was `alone`, only contents in `ends` remain possible.
        """
        assert self.may[key] & ends, f"key {key}: it cannot be so"
        if alone:
            self.may[key] &= ends

    def there(self, key: int) -> set[Held]:
        """Return the possible values under a key, without None."""
        return self.may[key] - {None}


class Play:
    """The clients of one world, and the results that they see."""

    def __init__(self, world: TierWorld, namespace: str, seed: int) -> None:
        """Make the clients. `seed` determines the faults of the clients."""
        self.model, self.alone = Model(namespace), True
        self.late = world.spec.kind in LATE
        self.before: list[Counter[TierFault]] = []
        self.tiers = [
            FaultyTier(world.make(), seeded(seed + i, CHANCES), late_s=0.001, seed=seed) for i in range(CLIENTS)
        ]

    async def round(self, steps: list[Step]) -> None:
        """Run `steps` concurrently."""
        self.alone = len(steps) == 1
        self.before = [tier.struck.copy() for tier in self.tiers]
        wait_s = HANG_S if any(step.fault is TierFault.HANG for step in steps) else WAIT_S
        if not self.alone:
            self.model.widen(steps)
        async with anyio.create_task_group() as group:
            for step in steps:
                group.start_soon(self._step, step, wait_s)
        for tier in self.tiers:
            tier.demanded.clear()
        assert self.model.untouched()

    def _see(self, key: int, ends: set[Held]) -> None:
        self.model.see(key, ends, alone=self.alone)

    def _struck(self, fault: TierFault, step: Step) -> bool:
        """Whether this step may have met a fault."""
        return self.tiers[step.client].struck[fault] > self.before[step.client][fault]

    async def _step(self, step: Step, wait_s: float) -> None:
        tier, ended = self.tiers[step.client], False
        if step.fault is not None:
            tier.demanded.append(step.fault)
        with anyio.move_on_after(wait_s if step.cancel_s is None else step.cancel_s) as scope:
            try:
                await getattr(self, f"_{step.what}")(step, tier)
                ended = True
            except TierError:
                event("failed")
        assert not (scope.cancelled_caught and step.cancel_s is None and wait_s == WAIT_S), f"{step.what} does not end"
        if not ended:
            self.model.widen([step])

    async def _write(self, step: Step, tier: FaultyTier) -> None:
        puts = [Put(self.model.keys[key], self.model.whole(key, step.seed)) for key in step.keys]
        try:
            ends = await tier.write(puts)
        finally:
            for put in puts:
                self.model.take_back(put.parts)
        for key, end in zip(step.keys, ends, strict=True):
            if end is Written.STORED and self.alone:
                self._see(key, {None})
                self.model.may[key] = {self.model.values[key, step.seed]}
            elif end is Written.PRESENT:
                self._see(key, self.model.there(key))

    async def _read(self, step: Step, tier: FaultyTier) -> None:
        gets = [Get(self.model.keys[key], (aligned(4096), aligned(BODY_BYTES[step.seed]))) for key in step.keys]
        try:
            ends = await tier.read(gets)
            seen = [(b"".join(get.into), self._intact(get)) for get in gets]
        finally:
            for get in gets:
                self.model.take_back(get.into)
        for key, end, (data, intact) in zip(step.keys, ends, seen, strict=True):
            if end is Read.HIT and intact:
                self._see(key, {data})
            elif end is Read.HIT:
                assert self._struck(TierFault.FLIP, step), "damaged without a fault"
            elif end is Read.DAMAGED:
                self._see(key, {v for v in self.model.there(key) if len(v or b"") != len(data)})
            elif not self._struck(TierFault.MISS, step):
                self._see(key, {None})

    @staticmethod
    def _intact(get: Get) -> bool:
        try:
            SEALER.unseal(get.key, 1, *get.into)
        except DamagedError:
            return False
        return True

    async def _exists(self, step: Step, tier: FaultyTier) -> None:
        found = await tier.exists([self.model.keys[key] for key in step.keys])
        if self.late:
            return
        for key, there in zip(step.keys, found, strict=True):
            if there:
                self._see(key, self.model.there(key))
            elif not self._struck(TierFault.MISS, step):
                self._see(key, {None})

    async def _delete(self, step: Step, tier: FaultyTier) -> None:
        least = sum(None not in self.model.may[key] for key in step.keys)
        most = sum(bool(self.model.there(key)) for key in step.keys)
        count = await tier.delete([self.model.keys[key] for key in step.keys])
        if self.alone:
            assert least <= count <= most, f"{count} deleted of at least {least}, at most {most}"
            for key in step.keys:
                self.model.may[key] = {None}

    async def _scan(self, _: Step, tier: FaultyTier) -> None:
        listed: list[Entry] = [entry async for entry in tier.scan()]
        sizes: dict[Key, int] = {entry.key: entry.bytes for entry in listed}
        assert len(sizes) == len(listed), "a key is listed twice"
        for i, key in enumerate(self.model.keys):
            size = sizes.pop(key, None)
            self._see(i, {v for v in self.model.may[i] if (None if v is None else len(v)) == size})
        assert self.model.keys[0].namespace not in {key.namespace for key in sizes}

    async def _capacity(self, _: Step, tier: FaultyTier) -> None:
        capacity: Capacity = await tier.capacity()
        least = sum(None not in may for may in self.model.may)
        assert not self.alone or least <= capacity.items

    async def _reopen(self, _: Step, tier: FaultyTier) -> None:
        await tier.close()
        await tier.open()

    async def _health(self, _: Step, tier: FaultyTier) -> None:
        await tier.health()


async def _clean(tier: Tier, model: Model) -> None:
    """Check that a client without faults finds each value that must exist, and that each value is complete."""
    await tier.open()
    for i, key in enumerate(model.keys):
        ends: set[Held] = set()
        for size in BODY_BYTES:
            get = Get(key, (aligned(4096), aligned(size)))
            (end,) = await tier.read([get])
            if end is Read.HIT:
                ends.add(b"".join(get.into))
            elif end is Read.MISS:
                ends.add(None)
        assert len(ends) == 1, f"key {i}: {len(ends)} values"
        model.see(i, ends, alone=True)
    await tier.close()


@pytest.mark.parametrize("name", CHEAP)
def test_tier_returns_written_values_or_fails(name: str, tmp_path: Path) -> None:
    """Under any calls and faults, reads return the bytes that were written, and no written value is lost."""
    spaces = itertools.count()

    async def play(rounds: list[list[Step]], seed: int) -> None:
        game = Play(world, f"{next(spaces):032x}", seed)
        for tier in game.tiers:
            await tier.open()
        for steps in rounds:
            await game.round(steps)
        with anyio.fail_after(WAIT_S):
            for tier in game.tiers:
                await tier.close()
        await _clean(world.make(), game.model)
        assert game.model.untouched()

    @examples(40)
    @given(rounds=ROUNDS, seed=st.integers(0, 1 << 16))
    def games(rounds: list[list[Step]], seed: int) -> None:
        anyio.run(play, rounds, seed)

    with WORLDS[name](tmp_path) as world:  # one store for all examples, because some stores take long to make
        games()


def test_the_same_seed_makes_the_same_faults() -> None:
    """A seed repeats its faults. Each fault occurs with its probability, and never with probability 0."""
    draw = [[fault for fault, _ in zip(seeded(seed, CHANCES), range(2000), strict=False)] for seed in (1, 1, 2)]
    assert draw[0] == draw[1] != draw[2]
    assert {fault for fault in draw[0] if fault} == set(CHANCES)
    assert 1200 < draw[0].count(None) < 1600
