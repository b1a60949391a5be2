"""A lookup asks tiers for few states, in two calls. Hits are as long as if all states had been looked up."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest

from kvpipe.scheduler.fetches import Staging
from kvpipe.scheduler.lacking import needed_chunks
from kvpipe.testing.held_tier import DictSpec, HeldTier
from kvpipe.testing.waiting import PATIENT, WAIT_S, eventually
from kvpipe.tiers.base import Key
from kvpipe.tiers.finder import Finder, Place, TierLookup
from kvpipe.tiers.guard import FIND, guarded
from kvpipe.tiers.prefix_keys import PrefixKeys, chunk_name
from tests.rigs.scheduler_world import SchedulerWorld

PER_CHUNK, UNITS, SPACE = 4, 24, "1" * 32
FULL, WINDOW, STATES = 0, 1, (2, 3, 4)


class _Counting(HeldTier):
    """A tier that counts the keys of each call."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[int] = []

    async def exists(self, keys: Sequence[Key]) -> list[bool]:
        """See `Tier.exists`."""
        self.asked.append(len(keys))
        return await super().exists(keys)


class _Case:
    """A prompt of which memory and a tier hold some chunks."""

    def __init__(self, world: SchedulerWorld, ranks: int) -> None:
        self.world, self.ranks, self.tier = world, ranks, _Counting()
        spec = DictSpec.model_validate(PATIENT)
        self.finder = Finder(
            guarded([("dict", spec, self.tier)], (FIND,)),
            ranks=ranks,
            units_per_chunk=PER_CHUNK,
            fault=lambda *_: None,
        )
        side = world.side
        settings = side.settings.model_copy(update={"lookup_ms_max": 60_000})
        self.staging = Staging(
            dataclasses.replace(side.context, settings=settings),
            self.finder,
            ranks=ranks,
            new_id=itertools.count(1).__next__,
            stores=False,
        )
        self.staging.space.base = SPACE
        self.request: Any = world.request("a", UNITS, extra=1)

    def remember(self, group: int, units: int) -> None:
        """Let memory hold a chunk that ends at a unit."""
        catalog, base = self.world.side.catalog, (units - 1) // PER_CHUNK * PER_CHUNK
        chunk = catalog.reserve(group)
        assert chunk is not None
        stop = 1 if group in STATES else units - base
        assert catalog.landed(catalog.write(chunk, stop, self.request.block_hashes[units - 1], keep=True))

    def store(self, group: int, units: int, ranks: Sequence[int]) -> None:
        """Let the tier hold a chunk that ends at a unit, but only the parts of the given ranks."""
        for rank in ranks:
            name = chunk_name(self.request.block_hashes[units - 1])
            self.tier.values[Key(SPACE, name, group, rank, self.ranks).text] = b""

    def reach(self) -> tuple[int, list[int]]:
        """Return the number of units that memory and a lookup find together, and the number of keys of each call."""
        self.tier.asked.clear()
        stage, _ = self.staging.ask(None, self.request, 0, 1, precedence=(0, 1))
        if stage is None:
            return self.world.side.prefixes.longest(self.request), []
        self._wait(stage.lookup)
        return self.staging._reach(stage), list(self.tier.asked)

    def reach_of_all(self) -> tuple[int, int]:
        """Return the numbers of units and keys of a lookup of every boundary of every group."""
        self.tier.asked.clear()
        keys = self.request.block_hashes
        wanted: list[Place] = []
        for group in range(len(self.world.side.geometry.groups)):
            step = 1 if group in STATES else PER_CHUNK
            index = self.world.side.catalog.index(group)
            wanted += [(group, end) for end in range(step, UNITS + 1, step) if keys[end - 1] not in index]
        lookup = TierLookup(PrefixKeys(keys, (FULL, WINDOW)), tuple(wanted), space=SPACE, seconds_max=WAIT_S)
        self.finder.look_up(lookup)
        self._wait(lookup)
        extra: tuple[dict[bytes, object], ...] = tuple({} for _ in self.world.side.geometry.groups)
        for place in lookup.found:
            extra[place[0]][lookup.key(place)] = lookup
        return self.world.side.prefixes.longest(self.request, extra), sum(self.tier.asked)

    @staticmethod
    def _wait(lookup: TierLookup) -> None:
        assert eventually(lambda: lookup.done)


def _make(ranks: int) -> _Case:
    windows = (None, 64, *[None] * len(STATES))
    return _Case(SchedulerWorld(windows=windows, states=STATES, chunk_units=PER_CHUNK), ranks)


def _fill(case: _Case, drawn: random.Random) -> None:
    """Let memory and the tier hold some chunks of every group, as if prompts of several lengths had been saved."""
    ends = sorted(drawn.sample(range(1, UNITS), drawn.randrange(1, 6)))
    for group in (FULL, WINDOW):
        whole = range(PER_CHUNK, drawn.choice((UNITS, *ends)) + 1, PER_CHUNK)
        for end in {*whole, *ends}:
            if drawn.random() < 0.9:
                case.store(group, end, range(case.ranks))
            if drawn.random() < 0.3:
                case.remember(group, end)
    for end, group in itertools.product(ends, STATES):
        if drawn.random() < 0.85:
            case.store(group, end, range(case.ranks) if drawn.random() < 0.9 else [0])
        if drawn.random() < 0.2:
            case.remember(group, end)


@pytest.mark.parametrize("ranks", [1, 2])
def test_hits_are_as_long_as_if_all_states_were_looked_up(ranks: int) -> None:
    """With any held chunks, a lookup needs at most two calls, and no more keys than a lookup of all states."""
    hits = 0
    for seed in range(60):
        case = _make(ranks)
        try:
            _fill(case, random.Random(seed))
            (reach, asked), (longest, keys) = case.reach(), case.reach_of_all()
            assert reach == longest, seed
            assert len(asked) <= 2, seed
            assert sum(asked) <= keys, seed
            hits += reach > case.world.side.prefixes.longest(case.request)
        finally:
            case.finder.stop()
    assert hits > 10


def test_lookup_asks_for_as_many_state_keys_as_one_group_has() -> None:
    """A lookup needs as many state keys as one group has, both when the tier has nothing and when it has everything."""
    case = _make(1)
    try:
        whole = 2 * UNITS // PER_CHUNK
        reach, asked = case.reach()
        assert (reach, asked[0]) == (0, whole + UNITS)
        assert sum(asked[1:]) <= 2 * (PER_CHUNK - 1)
        for group in (FULL, WINDOW):
            for end in range(PER_CHUNK, UNITS + 1, PER_CHUNK):
                case.store(group, end, [0])
        for group in STATES:
            case.store(group, 8, [0])
            case.store(group, 20, [0])
        reach, asked = case.reach()
        assert (reach, asked) == (20, [whole + UNITS, (len(STATES) - 1) * 2])
    finally:
        case.finder.stop()


def test_needed_chunks_lists_attention_chunks_before_states() -> None:
    """Attention chunks are fetched first, because only attention chunks show the policy the chunk before them."""
    world = SchedulerWorld(windows=(None, None), states=(0,), chunk_units=PER_CHUNK)
    case = _Case(world, 1)
    try:
        for end in range(PER_CHUNK, UNITS + 1, PER_CHUNK):
            case.store(1, end, [0])
        case.store(0, UNITS, [0])
        stage, _ = case.staging.ask(None, case.request, 0, 1, precedence=(0, 1))
        assert stage is not None
        case._wait(stage.lookup)
        staging = case.staging
        reach = staging._reach(stage)
        wanted = [place for place, _ in needed_chunks(staging._catalog, staging._geometry, stage, reach)]
        assert wanted == [*((1, end) for end in range(PER_CHUNK, UNITS + 1, PER_CHUNK)), (0, UNITS)]
    finally:
        case.finder.stop()
