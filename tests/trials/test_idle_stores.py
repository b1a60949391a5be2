"""An engine without requests makes steps for stores only for a limited time, even if its tiers hang."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from kvpipe.scheduler import fetches, stores
from kvpipe.scheduler.stores import Storing
from kvpipe.testing.dict_tier import DictTier
from kvpipe.testing.held_tier import HeldTier
from tests.trials.test_fetches import ADD, SHAPE, Played, in_play

STEPS: tuple[tuple[object, ...], ...] = (("schedule",), ("update",))
LIMIT_S = 30


class Clock:
    """The stores' clock, which does not advance."""

    def __init__(self) -> None:
        """Start at a late time."""
        self.now_s = 5000.0


@contextmanager
def storing(patch: pytest.MonkeyPatch) -> Iterator[tuple[Played, Storing, Clock]]:
    """Yield a trial without requests. The trial has two chunks to store, one at a time, in a tier that hangs."""
    clock = Clock()
    patch.setattr(stores, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    patch.setattr(HeldTier, "exists", DictTier.exists)  # only writes hang
    with in_play(SHAPE) as played:
        side: Any = played.trial.side
        one: Storing = side.staging.stores
        one.idle_s_max, one._in_flight_max = LIMIT_S, 1
        played.trial.tiers[0].values.clear()
        played.trial.excused |= {"stores_too_slow"}
        played.do(("hold", True), ADD, *STEPS * 8)
        assert not played.trial.live
        assert (len(one.owners), len(one._offers)) == (1, 1)
        yield played, one, clock
        played.do(("hold", False), ("drain",))


def test_a_slow_tier_does_not_keep_an_idle_engine_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the time limit no further store begins.

    The chunks that wait are counted with a reason, and are stored in later steps.
    """
    noted = list[dict[str, Any]]()
    with storing(monkeypatch) as (played, one, clock):
        side = played.trial.side
        side.counters.watcher = lambda name, fields: noted.append({"name": name, **fields})
        clock.now_s += LIMIT_S - 1
        assert not one.pending, "it waits for the one that is under way"
        clock.now_s += 1
        played.do(("hold", False), *STEPS)
        assert (len(one.owners), len(one._offers)) == (0, 1)
        assert not side.pending
        assert not side.pending
        assert side.counters["stores_put_off"] == 1
        assert noted == [
            {"name": "stores_too_slow", "chunks": 1, "tiers": "dict-0", "why": f"store_idle_s_max={LIMIT_S}"}
        ]
        stored = side.counters["chunks_stored"]
        played.do(("add", 3, 60, 0, 3, 0, 0), *STEPS, ("drain",))
        assert side.counters["chunks_stored"] > stored
        assert not one._offers
        assert side.counters["stores_put_off"] == 1


def test_a_tier_that_hangs_does_not_keep_an_idle_engine_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that hangs does not keep the engine busy.

    Chunks that wait to be stored are counted with a reason, and are lost when the engine ends.
    """
    noted = list[dict[str, Any]]()
    with storing(monkeypatch) as (played, one, _):
        side: Any = played.trial.side
        side.counters.watcher = lambda name, fields: noted.append({"name": name, **fields})
        assert side.pending
        with monkeypatch.context() as patch:
            patch.setattr(fetches, "PATIENCE_S", 0.0)
            assert not side.pending
            played.do(*STEPS)
            assert not side.pending
        assert noted == [{"name": "stores_too_slow", "chunks": 1, "tiers": "dict-0", "why": "no answer"}]
        one.end()
        one.end()
        assert (side.counters["stores_put_off"], side.counters["store_dropped_engine_ended"]) == (1, 1)


def test_each_idle_stretch_has_its_own_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time in which the engine computes is not a part of the limit."""
    with storing(monkeypatch) as (played, one, clock):
        played.do(("add", 3, 60, 0, 3, 0, 0))
        clock.now_s += 2 * LIMIT_S
        played.do(*STEPS, ("hold", False), *STEPS * 8)
        assert not one._offers
        assert played.trial.side.counters["stores_put_off"] == 0


def test_offers_of_a_salt_stay_when_another_salt_offers_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """The salt with the most offers loses the oldest of its offers, even if another salt has an older offer."""
    monkeypatch.setattr(stores, "OFFERS_MAX", 2)
    monkeypatch.setattr(HeldTier, "exists", DictTier.exists)  # only writes hang
    with in_play(SHAPE._replace(pool_slots=32)) as played:
        one = played.staging.stores
        one._in_flight_max = 1
        for document, salt in ((1, 0), (0, 1), (1, 2), (2, 2), (3, 2)):
            played.do(("hold", True), ("add", document, 40, 0, 3, salt, 0), *STEPS * 8)
            assert not played.trial.live
        assert [offer.chunk.tenant.salt for offer in one._offers.values()] == ["1", "2"]
        assert played.trial.side.counters["store_dropped_queue_full"] == 2
        played.do(("hold", False), ("drain",))
        assert not one._offers
        assert not one._shares
