"""Which states tiers are asked for: few of them, in two calls, and hits are as long as if all had been asked for."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest

from kvpipe.connectors.vllm.trial.scheduler_world import SchedulerWorld
from kvpipe.scheduler.fetches import Staging
from kvpipe.testing.held_tier import DictSpec, HeldTier
from kvpipe.testing.waiting import PATIENT, WAIT_S, eventually
from kvpipe.tiers.base import Key
from kvpipe.tiers.finder import Finder, Place, TierLookup, chunk_name
from kvpipe.tiers.guard import FIND, guarded

PER_CHUNK, UNITS, SPACE = 4, 24, "1" * 32
FULL, WINDOW, STATES = 0, 1, (2, 3, 4)


class _Counting(HeldTier):
    """Counts the keys of each call."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[int] = []

    async def exists(self, keys: Sequence[Key]) -> list[bool]:
        """See `Tier.exists`."""
        self.asked.append(len(keys))
        return await super().exists(keys)


class _Case:
    """A prompt of which memory and a tier hold something."""

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
        self.staging = Staging(
            self.finder,
            side.catalog,
            side.prefixes,
            side.geometry,
            ranks=ranks,
            lookup_ms_max=60_000,
            bytes_in_flight_max=1 << 30,
            counters=side.counters,
            new_id=itertools.count(1).__next__,
            stores=False,
            published=lambda *_: None,
        )
        self.staging.space.base = SPACE
        self.request: Any = world.request("a", UNITS, extra=1)

    def remember(self, group: int, units: int) -> None:
        """Let memory hold a chunk that ends there."""
        catalog, base = self.world.side.catalog, (units - 1) // PER_CHUNK * PER_CHUNK
        chunk = catalog.reserve(group)
        assert chunk is not None
        stop = 1 if group in STATES else units - base
        assert catalog.landed(catalog.write(chunk, stop, self.request.block_hashes[units - 1], keep=True))

    def store(self, group: int, units: int, ranks: Sequence[int]) -> None:
        """Let the tier hold those ranks' parts of a chunk that ends there."""
        for rank in ranks:
            name = chunk_name(self.request.block_hashes[units - 1])
            self.tier.values[Key(SPACE, name, group, rank, self.ranks).text] = b""

    def reach(self) -> tuple[int, list[int]]:
        """Return how many units a lookup finds, with memory, and how many keys each call had."""
        self.tier.asked.clear()
        stage, _ = self.staging.ask(None, self.request, 0, 1, turn=(0, 1))
        if stage is None:
            return self.world.side.prefixes.longest(self.request), []
        self._wait(stage.lookup)
        return self.staging._reach(stage), list(self.tier.asked)

    def reach_of_all(self) -> tuple[int, int]:
        """Return the same if every boundary of every group were asked for, and how many keys that takes."""
        self.tier.asked.clear()
        keys = self.request.block_hashes
        wanted: list[Place] = []
        for group in range(len(self.world.side.geometry.groups)):
            step = 1 if group in STATES else PER_CHUNK
            index = self.world.side.catalog.index(group)
            wanted += [(group, end) for end in range(step, UNITS + 1, step) if keys[end - 1] not in index]
        lookup = TierLookup(keys, tuple(wanted), groups=(FULL, WINDOW), space=SPACE, seconds_max=WAIT_S)
        self.finder.ask(lookup)
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
    """Let memory and the tier hold some of everything, as prompts that end here and there would leave it."""
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
def test_no_hit_is_shorter_than_if_all_had_been_asked_for(ranks: int) -> None:
    """Whatever memory and the tier hold; in two calls, and with no more keys."""
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


def test_how_much_is_asked_for() -> None:
    """As much of states as of one group, whether the tier has nothing or all of a prompt: with all groups' last one."""
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


def test_states_come_behind_what_they_follow() -> None:
    """What lands first says what a chunk follows, for the policy: of states it is not known."""
    world = SchedulerWorld(windows=(None, None), states=(0,), chunk_units=PER_CHUNK)
    case = _Case(world, 1)
    try:
        for end in range(PER_CHUNK, UNITS + 1, PER_CHUNK):
            case.store(1, end, [0])
        case.store(0, UNITS, [0])
        stage, _ = case.staging.ask(None, case.request, 0, 1, turn=(0, 1))
        assert stage is not None
        case._wait(stage.lookup)
        wanted = [place for place, _ in case.staging._needed(stage)]
        assert wanted == [*((1, end) for end in range(PER_CHUNK, UNITS + 1, PER_CHUNK)), (0, UNITS)]
    finally:
        case.finder.stop()
