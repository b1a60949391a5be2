"""A tier with a bug returns less, more or other things than requested, or raises exceptions that no tier may raise.

Every such answer is a failure of that tier and a miss, never a wrong hit. After several failures in a row the tier is
not used any more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import pytest
from pydantic import ByteSize

from kvpipe.testing.held_tier import DictSpec, HeldTier
from kvpipe.testing.waiting import PATIENT, eventually
from kvpipe.tiers.base import Capacity, Read, TierError, Written
from kvpipe.tiers.finder import Finder, TierLookup
from kvpipe.tiers.guard import FAULTS_MAX, FIND, READ, WRITE, capacity_of, guarded
from kvpipe.tiers.prefix_keys import PrefixKeys
from tests.tiers.test_carrier import Rank

SPACE = "1" * 32
KEYS = [bytes([unit]) * 32 for unit in range(8)]


def _raises(_asked: object) -> list[Any]:
    raise KeyError("a bug")


async def _raises_late(_asked: object) -> list[Any]:
    return _raises(_asked)


def _answers(answer: Callable[[int], Any]) -> Callable[[Any], Any]:
    async def method(asked: Any) -> Any:
        return answer(len(asked))

    return method


LIES: dict[str, Callable[[Any], Any]] = {
    "nothing": _answers(lambda _: None),
    "too few": _answers(lambda _: []),
    "too many": _answers(lambda n: [True] * (n + 1)),
    "numbers": _answers(lambda n: [1] * n),
    "a name": _answers(lambda n: "x" * n),
    "not a coroutine": lambda asked: [True] * len(asked),
    "raises": _raises,
    "raises late": _raises_late,
}


@pytest.mark.parametrize("lie", LIES)
def test_wrong_answer_to_a_lookup_is_a_miss(lie: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If `exists` returns a wrong answer, the chunk is not found.

    After several wrong answers the tier is not used any more.
    """
    tier, received = HeldTier(), list[str]()
    monkeypatch.setattr(tier, "exists", LIES[lie])
    spec = DictSpec.model_validate(PATIENT)
    finder = Finder(
        guarded([("lying", spec, tier)], (FIND,)),
        ranks=1,
        units_per_chunk=4,
        fault=lambda tier, use, why: received.append(f"{tier} {use} {why}"),
    )
    try:
        for _ in range(FAULTS_MAX):
            lookup = TierLookup(PrefixKeys(KEYS, (0,)), ((0, 4), (0, 8)), space=SPACE, seconds_max=60)
            finder.look_up(lookup)
            assert eventually(lambda asked=lookup: asked.done)  # type: ignore[misc]
            assert (lookup.found, lookup.down) == ({}, True)
        assert all(one.startswith("lying find lying: ") for one in received)
        assert not finder.tiers[0].breakers[FIND].allows
        assert not finder.loop.errors
    finally:
        finder.stop()


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("use", [READ, WRITE])
def test_wrong_answer_to_a_read_or_write_fails_the_order(lie: str, use: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If `read` or `write` returns a wrong answer, the order fails.

    After several failures, calls of this method stop.
    """
    tier = HeldTier("lying")
    rank = Rank([tier])
    try:
        rank.carry(stores=True, slot=0)
        assert rank.ended() == [True]
        monkeypatch.setattr(tier, use, LIES[lie])
        for _ in range(FAULTS_MAX):
            rank.carry(stores=use == WRITE, slot=0)
            assert rank.ended() == [False]
        assert rank.counters.faults == {"tier_failed": FAULTS_MAX}
        assert not rank.tiers[0].breakers[use].allows
    finally:
        rank.carrier.shutdown()


def test_hit_without_bytes_and_store_without_a_value_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tier returns HIT although it has not filled the buffers, or STORED although it has kept nothing."""
    tier = HeldTier()
    rank = Rank([tier])
    try:
        monkeypatch.setattr(tier, "write", _answers(lambda n: [Written.STORED] * n))
        rank.carry(stores=True, slot=0)
        assert rank.ended() == [True]
        rank.carry(stores=False, slot=1)
        assert rank.ended() == [False], "a miss"
        monkeypatch.setattr(tier, "read", _answers(lambda n: [Read.HIT] * n))
        rank.carry(stores=False, slot=1)
        assert rank.ended() == [False]
        assert rank.counters.faults == {"chunk_damaged": 1}
    finally:
        rank.carrier.shutdown()


@pytest.mark.parametrize("held", [None, (1, 2, 3), Capacity(-1, 0, None), Capacity(1, 2, -3), Capacity(1, 2.5, None)])  # type: ignore[arg-type]
def test_impossible_capacity_is_ignored(held: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An impossible capacity is not shown: reading it raises a TierError that names the tier."""
    tier = HeldTier("lying")

    async def capacity() -> Any:
        return held

    monkeypatch.setattr(tier, "capacity", capacity)
    with pytest.raises(TierError, match="lying: "):
        anyio.run(capacity_of, tier)


def test_a_capacity_from_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit from the configuration that is of a subclass of `int` is accepted like any other number."""
    tier, held = HeldTier(), Capacity(1, 2, ByteSize(3))

    async def capacity() -> Capacity:
        return held

    monkeypatch.setattr(tier, "capacity", capacity)
    assert anyio.run(capacity_of, tier) == held


def test_exception_of_stored_does_not_reach_the_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler's thread calls a tier's `stored`. An exception of this call is contained."""
    tier, received = HeldTier(), list[str]()
    monkeypatch.setattr(tier, "stored", _raises, raising=False)
    finder = Finder(
        guarded([("lying", DictSpec.model_validate({}), tier)], (FIND,)),
        ranks=1,
        units_per_chunk=4,
        fault=lambda _tier, _use, why: received.append(why),
    )
    try:
        finder.stored(0, SPACE, KEYS[0], 0)
        assert received == ["KeyError('a bug')"]
    finally:
        finder.stop()
