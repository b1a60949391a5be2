"""Tests of lookups in tiers: which chunks are found, in which order tiers are asked, and what a failing tier costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import anyio
import pytest

from kvpipe.testing.held_tier import DictSpec, HeldTier
from kvpipe.testing.waiting import PATIENT, WAIT_S, eventually
from kvpipe.tiers import finder as finders
from kvpipe.tiers.base import Key
from kvpipe.tiers.finder import Finder, Place, TierLookup
from kvpipe.tiers.first_hash import leave_first_hash
from kvpipe.tiers.guard import FAULTS_MAX, FIND, WRITE, guarded
from kvpipe.tiers.parts import mark_key
from kvpipe.tiers.prefix_keys import PrefixKeys, chunk_name

SPACE, PER_CHUNK = "1" * 32, 4
KEYS = [bytes([unit]) * 32 for unit in range(14)]
WHOLE: tuple[Place, ...] = ((0, 4), (0, 8), (0, 12))


@contextmanager
def _finder(*tiers: HeldTier, ranks: int = 1, faults: list[str] | None = None, **spec: Any) -> Iterator[Finder]:
    reported = DictSpec.model_validate(PATIENT | spec)
    received = [] if faults is None else faults
    kept = guarded([(tier.name, reported, tier) for tier in tiers], (FIND,))
    for one in kept:
        one.probe_s = WAIT_S  # failed tiers are not probed during the test
    made = Finder(
        kept,
        ranks=ranks,
        units_per_chunk=PER_CHUNK,
        fault=lambda tier, use, why: received.append(f"{tier} {use}: {why}"),
    )
    try:
        yield made
        assert not made.loop.errors
    finally:
        made.stop()


def _hold(tier: HeldTier, *ends: int, group: int = 0, rank: int = 0, ranks: int = 1) -> None:
    for units in ends:
        tier.values[Key(SPACE, chunk_name(KEYS[units - 1]), group, rank, ranks).text] = b""


def _lookup(wanted: Sequence[Place] = WHOLE, seconds_max: float = 60.0, **more: Any) -> TierLookup:
    groups = range(1 + max((group for group, _ in wanted), default=0))
    reported: dict[str, Any] = {"keys": KEYS, "space": SPACE, "groups": groups} | more
    prefix = PrefixKeys(**{key: reported.pop(key) for key in PrefixKeys._fields if key in reported})
    return TierLookup(prefix, tuple(wanted), seconds_max=seconds_max, **reported)


def _ask(finder: Finder, wanted: Sequence[Place] = WHOLE, seconds_max: float = 60.0, **more: Any) -> TierLookup:
    lookup = _lookup(wanted, seconds_max, **more)
    finder.look_up(lookup)
    assert eventually(lambda: lookup.done)
    return lookup


def test_lookup_finds_whole_chunks_and_the_partial_chunk_behind_them() -> None:
    """A lookup asks for all whole chunks, and for every possible length of the chunk behind the last whole chunk."""
    tier = HeldTier()
    _hold(tier, 4, 8, 10, 11, 13)
    with _finder(tier) as finder:
        assert _ask(finder).found == dict.fromkeys([(0, 4), (0, 8), (0, 10), (0, 11)], 0)
        tier.values.clear()
        _hold(tier, 4, 8, 12, 13)
        assert _ask(finder).found == dict.fromkeys([*WHOLE, (0, 13)], 0)
        assert _ask(finder, [(0, 12)]).found == dict.fromkeys([(0, 12), (0, 13)], 0)


def test_every_rank_must_have_its_part() -> None:
    """A chunk is found only if the parts of all ranks exist."""
    tier = HeldTier()
    for rank in range(3):
        _hold(tier, 4, rank=rank, ranks=3)
    _hold(tier, 8, rank=1, ranks=3)
    with _finder(tier, ranks=3) as finder:
        assert _ask(finder).found == {(0, 4): 0}


def test_lookup_records_misses_of_announced_chunks_only() -> None:
    """A miss is recorded only for a chunk that routers know. The scheduler's thread does no work for other chunks."""
    tier, other = HeldTier("a"), HeldTier("b")
    _hold(tier, 4)
    with _finder(tier, other) as finder:
        known = [(0, chunk_name(KEYS[units - 1])) for units in (4, 8)]
        lookup = _lookup()
        lookup.misses, lookup.announced = [], [dict.fromkeys(known), {}]
        finder.look_up(lookup)
        assert eventually(lambda: lookup.done)
        assert lookup.misses == [(0, known[1])]


def _mark(tier: HeldTier, space: str, *split: int) -> None:
    tier.values[mark_key(space, split).text] = b""


class Counting(HeldTier):
    """A tier that records the keys of each lookup."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[list[str]] = []

    async def exists(self, keys: Sequence[Key]) -> list[bool]:
        """See `Tier.exists`."""
        self.asked.append([key.text for key in keys])
        return await super().exists(keys)


def test_chunks_of_other_numbers_of_ranks_are_found() -> None:
    """Chunks that other numbers of ranks have stored are found if a marker shows that such chunks exist.

    These chunks may be in another namespace. The lookup reports their namespace and number of parts.
    """
    tier, other = HeldTier(), "2" * 32
    for rank in range(2):
        _hold(tier, 4, rank=rank, ranks=2)
    _hold(tier, 8)
    tier.values[Key(other, chunk_name(KEYS[11]), 0, 0, 1).text] = b""
    with _finder(tier) as finder:
        finder.heads = (4,)
        assert _ask(finder, also=other).found == {(0, 8): 0}
    _mark(tier, SPACE, 2)
    _mark(tier, other, 1)
    with _finder(tier) as finder:
        finder.heads = (4,)
        lookup = _ask(finder, also=other)
        assert lookup.found == dict.fromkeys(WHOLE, 0)
        assert lookup.elsewhere == {(0, 4): (SPACE, 2), (0, 12): (other, 1)}
    with _finder(tier) as finder:  # a finder without `heads` looks up only names of its own layout
        assert _ask(finder, also=other).found == {(0, 8): 0}


def test_other_splits_are_searched_where_they_help() -> None:
    """If another split lacks the first chunk, later chunks are not searched in this split.

    In groups whose chunks never grow, later chunks are searched too.
    """
    tier = Counting()
    _mark(tier, SPACE, 2, 2)
    _hold(tier, 4)
    for rank in range(2):
        _hold(tier, 12, rank=rank, ranks=2)
        _hold(tier, 2, group=1, rank=rank, ranks=2)
    wanted = (*WHOLE, (1, 1), (1, 2))

    def chunks() -> list[int]:
        return [sum("-r0of2" in name for name in asked) for asked in tier.asked if any("of2" in one for one in asked)]

    with _finder(tier) as finder:
        finder.heads = (4, 4)
        assert _ask(finder, wanted, groups=(0,)).found == {(0, 4): 0}
        assert chunks() == [1, PER_CHUNK - 1]
        tier.asked.clear()
        for rank in range(2):
            _hold(tier, 8, rank=rank, ranks=2)
        assert _ask(finder, wanted, groups=(0,)).found == dict.fromkeys([*WHOLE, (1, 2)], 0)
        assert chunks() == [1, 3, 2]
        _hold(tier, 8, 12, 13)
        assert _ask(finder, wanted, groups=(0,)).found == dict.fromkeys([*WHOLE, (0, 13), (1, 2)], 0)


class _Slow(HeldTier):
    """A tier that never answers a lookup of chunks in two parts."""

    async def exists(self, keys: Sequence[Key]) -> list[bool]:
        """See `Tier.exists`."""
        if any(key.ranks == 2 for key in keys):
            await anyio.sleep_forever()
        return await super().exists(keys)


def test_search_for_other_splits_ends_within_the_limit() -> None:
    """The search for other splits may take any time. The lookup still ends within the request's limit."""
    tier, right = _Slow(), {(0, 4): 0, (0, 5): 0}
    _mark(tier, SPACE, 2)
    _hold(tier, 4, 5)
    for seconds_max in (2.0, 8.0, 32.0):  # a slow machine needs more time for its own chunks
        faults = list[str]()
        with _finder(tier, faults=faults) as finder:
            finder.heads = (4,)
            lookup = _ask(finder, seconds_max=seconds_max)
        if lookup.found == right and not faults:
            break
    assert lookup.found == right
    assert lookup.down
    assert not faults, "it took until the end, and was taken for a failure"


def test_lookup_asks_for_no_other_split_when_it_finds_everything() -> None:
    """A lookup asks for other splits only if chunks are missing, and not in every such lookup."""
    tier = Counting()
    _hold(tier, *range(4, 15))
    with _finder(tier) as finder:
        finder.heads = (4,)
        assert len(_ask(finder).found) == 5
        assert len(tier.asked) == 2
        tier.values.clear()
        tier.asked.clear()
        for _ in range(3):
            _ask(finder)
        marks = {mark_key(SPACE, (split,)).text for split in (2, 4)}
        assert [len(asked) for asked in tier.asked if marks & {*asked}] == [2]
        assert len(tier.asked) == 1 + 2 * 3
        finder.heads = (1,)
        tier.asked.clear()
        _ask(finder, space="3" * 32)
        assert len(tier.asked) == 2


def test_chunk_of_one_group_is_not_found_in_another_group() -> None:
    """Two cache groups may hold chunks of the same prefix.

    If a tier has the chunk of one group, the other group's chunk is still a miss.
    """
    tier = HeldTier()
    _hold(tier, 4, group=1)
    with _finder(tier) as finder:
        assert _ask(finder, [(0, 4), (1, 4)]).found == {(1, 4): 0}


def test_each_tier_is_asked_for_what_earlier_tiers_lack() -> None:
    """Tiers are asked in order. Each tier is asked only for chunks that the tiers before it lack."""
    near, far = HeldTier("near"), HeldTier("far")
    _hold(near, 4)
    _hold(far, 4, 8)
    with _finder(near, far) as finder:
        assert _ask(finder).found == {(0, 4): 0, (0, 8): 1}


def test_failing_tier_is_a_miss() -> None:
    """A tier that fails is skipped, and is not used any more after several failures. The other tiers are asked."""
    near, far = HeldTier("near"), HeldTier("far")
    _hold(far, 4)
    near.trouble = "down"
    faults: list[str] = []
    with _finder(near, far, faults=faults) as finder:
        for _ in range(FAULTS_MAX + 2):
            lookup = _ask(finder)
            assert lookup.found == {(0, 4): 1}
            assert lookup.down
        assert finder.usable
        far.trouble = "down"
        for _ in range(FAULTS_MAX):
            assert _ask(finder).found == {}
        assert not any(tier.breakers[FIND].allows for tier in finder.tiers)
    assert set(faults) == {"near find: it is down", "far find: it is down"}
    assert len(faults) < 3 * FAULTS_MAX


def test_hanging_tier_is_a_miss_after_the_limit() -> None:
    """A lookup ends within its own limit and the tier's limit, and reports that a tier has not answered."""
    tier = HeldTier()
    tier.hold()
    faults = list[str]()
    with _finder(tier, faults=faults) as finder:

        def failed(times: int) -> bool:
            lookup = _ask(finder, seconds_max=0.05)  # on a slow machine the limit may pass before the tier is asked
            assert (lookup.found, lookup.down) == ({}, True)
            return len(faults) == times

        # the lookup's own limit ends the wait, because it is shorter than the tier's limit by default
        for left in reversed(range(FAULTS_MAX)):
            assert eventually(partial(failed, FAULTS_MAX - left))
            assert finder.tiers[0].breakers[FIND].allows == (left > 0)
    with _finder(tier, timeout_ms_max=30) as finder:
        lookup = _ask(finder)
        assert lookup.down
        assert not finder.usable
    tier.let_go()


def test_stopped_finder_answers_with_misses() -> None:
    """A stopped finder ends each lookup without a result."""
    with _finder(HeldTier()) as finder:
        pass
    assert not _ask(finder).found


class _Broken(HeldTier):
    """A tier with a bug."""

    async def open(self) -> None:
        """Raise an exception that a tier must not raise."""
        raise RuntimeError("can't start new thread")


def test_a_tier_with_a_bug_costs_only_itself() -> None:
    """An exception from a buggy tier is a failure of that tier only: the other tiers are asked as before."""
    good = HeldTier("good")
    _hold(good, 4)
    faults: list[str] = []
    with _finder(_Broken("broken"), good, faults=faults) as finder:
        for _ in range(FAULTS_MAX + 1):
            assert _ask(finder).found == {(0, 4): 1}


def test_a_tier_that_a_rank_cannot_read() -> None:
    """A tier that some rank does not use is not asked, because this rank could not read the tier's chunks."""
    tier = HeldTier()
    _hold(tier, 4)
    with _finder(tier) as finder:
        assert _ask(finder).found
        finder.unreadable = frozenset({0})
        assert not finder.usable
        assert not _ask(finder).found


def test_states_are_looked_up_under_their_own_keys() -> None:
    """States, whose chunks never grow, are looked up under the keys in `states`."""
    tier, states = HeldTier(), [b"state" + key for key in KEYS]
    tier.values[Key(SPACE, chunk_name(states[2]), 1, 0, 1).text] = b""
    with _finder(tier) as finder:
        assert _ask(finder, [(1, 2), (1, 3)], groups=(0,), states=states).found == {(1, 3): 0}


def test_other_state_groups_are_looked_up_only_where_the_first_state_group_has_a_state() -> None:
    """The first call asks for the states of one group.

    The second call asks for the states of other groups, but only where the first group has a state and attention is
    held. So few keys are asked for in both calls.
    """
    tier = Counting()
    _hold(tier, 4, 8, 9)
    for group, ends in ((1, (3, 7, 9, 12)), (2, (3, 5, 9, 12)), (3, (3, 7, 9, 12))):
        _hold(tier, *ends, group=group)
    wanted = [*WHOLE, *((1, units) for units in range(1, 14))]
    groups: dict[str, Any] = {"groups": (0,), "state_groups": (1, 2, 3), "full": (0,)}
    with _finder(tier) as finder:
        found = _ask(finder, wanted, **groups).found
        assert {place for place in found if place[0] > 1} == {(2, 3), (2, 9), (3, 3), (3, 7), (3, 9)}
        assert [len(asked) for asked in tier.asked] == [len(wanted), PER_CHUNK - 1 + 2 * 3]
        tier.asked.clear()
        _hold(tier, 12)
        assert {(2, 12), (3, 12)} <= _ask(finder, wanted, **groups).found.keys()
        assert len(tier.asked) == 2


@pytest.mark.parametrize(("theirs", "differs", "said"), [("", 0.0, 0), ("sha256 a", 0.0, 0), ("sha256 b", 1.0, 1)])
def test_another_first_hash_is_reported_once(
    theirs: str, differs: float, said: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines with different first hashes find no chunks of each other.

    Without the report, nobody would see the reason.
    """
    tier, notes = HeldTier(), list[tuple[str, str]]()
    monkeypatch.setattr(finders, "warn", lambda name, **fields: notes.append((name, fields["tier"])))
    if theirs:
        (writer,) = guarded([(tier.name, DictSpec.model_validate(PATIENT), tier)], (WRITE,))
        anyio.run(leave_first_hash, writer, SPACE, theirs)
    with _finder(tier) as finder:
        finder.first_hash = "sha256 a"
        _ask(finder)
        assert _ask(finder).why == ""
        assert finder.other_hashes == {"dict": differs}
    assert notes == [("first_hash_differs", "dict")] * said


def test_a_first_hash_is_compared_again_when_the_tier_was_down() -> None:
    """If the tier was down when the first hash was to be compared, a later lookup compares it."""
    tier = HeldTier()
    with _finder(tier) as finder:
        finder.first_hash = "sha256 a"
        tier.trouble = "down"
        _ask(finder)
        assert finder.other_hashes == {}
        tier.trouble = "none"
        _ask(finder)
        assert finder.other_hashes == {"dict": 0.0}
