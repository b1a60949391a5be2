"""More requests wait than the engine can serve, and tiers hold the chunks of the waiting requests (decision 11)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvpipe.scheduler.stages import Stage
from kvpipe.statemachine import stage as m
from tests.trials.test_fetches import ADD, SHAPE, Played, in_play


@contextmanager
def _busy(played: Played, *, asks: bool) -> Iterator[None]:
    """Make the engine admit no request. With `asks` the engine still looks requests up, but has no blocks for them."""
    scheduler = played.trial.scheduler
    with pytest.MonkeyPatch.context() as patch:
        if asks:
            patch.setattr(scheduler.kv_cache_manager, "allocate_slots", lambda *_, **__: None)
        else:
            patch.setattr(scheduler, "max_num_active_reqs", 0)
        yield


STEP = ("schedule",), ("update",)


def _brought(played: Played) -> int:
    """Return the number of hit tokens from the tier so far."""
    return int(played.trial.side.tracer.hit_tokens["dict-0"])


def test_chunks_that_arrived_in_time_are_used_by_a_late_lookup() -> None:
    """A busy engine repeats the lookup only after `lookup_ms_max`.

    Before that lookup, the tier's chunks have arrived.
    """
    with in_play() as played:
        played.do(ADD, *STEP)
        assert played.waiting == [m.ASKING]
        with _busy(played, asks=False):
            played.do(*STEP * 3, ("late",))
            assert played.waiting == [m.HELD]
        played.do(("drain",))
        assert _brought(played) >= 128
        assert "tier_late" not in played.trial.side.tracer.misses


def test_a_request_that_the_engine_has_no_room_for_is_not_late() -> None:
    """For ten minutes the engine has no room and makes no lookups, and a tier does not answer.

    These minutes count as one step of waiting.
    """
    with in_play() as played:
        played.do(ADD, *STEP, ("hold", True), *STEP)
        assert played.waiting == [m.FETCHING]
        with _busy(played, asks=False):
            played.do(("late",), *STEP)
        played.do(*STEP)
        assert played.waiting == [m.FETCHING]
        played.do(("hold", False), ("drain",))
        assert _brought(played) >= 128
        assert not played.trial.side.counters["tier_lookup_late"]


def test_request_is_looked_up_again_when_a_tier_was_late() -> None:
    """The request's first lookup finds only a few chunks in time. Then the engine has no free blocks for a long time.

    During that time a second lookup gets the other chunks.
    """
    with in_play() as played:
        played.do(("hold", True), ADD, *STEP, ("late",))
        with _busy(played, asks=True):
            played.do(*STEP)
            assert played.trial.side.counters["tier_lookup_late"] == 1
            assert played.waiting == [m.OVER]
            played.do(*STEP)
            assert played.waiting == [m.OVER], "not at once"
            played.do(("hold", False), ("late",), *STEP * 4)
            assert played.waiting == [m.HELD]
        played.do(("drain",))
        assert _brought(played) >= 128
        assert played.trial.side.counters["tier_lookup_again"] == 1


def test_request_takes_the_room_of_requests_that_came_later() -> None:
    """A request takes the room of requests that arrived later.

    Those requests are looked up again when the earlier request has finished.
    """
    with in_play(SHAPE._replace(pool_slots=3)) as played:
        for i in range(2):
            played.do(("add", i, 199, 0, 3, 0, 0), ("drain",))
        played.forget()
        side = played.trial.side
        with _busy(played, asks=False):
            played.do(("hold", True), ADD, ("add", 1, 199, 0, 3, 0, 0))
            first, last = played.trial.scheduler.waiting
            side.lookup(first, 0)
            played.do(*STEP * 2, ("late",))
            side.lookup(first, 0)
            played.do(("hold", False), *STEP)
            side.lookup(last, 0)
            played.do(*STEP * 4)
            assert played.waiting == [m.OVER, m.HELD]
            played.do(("late",))
            side.lookup(first, 0)
            played.do(*STEP * 4)
            assert played.waiting == [m.HELD, m.OVER]
            assert side.counters["tier_gave_way"] == 1
            played.do(("late",))
            side.lookup(last, 0)
            assert side.counters["tier_lookup_again"] == 1, "there is no room for it"
            played.do(*STEP)
        played.do(("drain",))
        assert side.counters["tier_lookup_again"] == 2
        assert _brought(played) >= 2 * 128


def test_request_takes_the_room_of_requests_with_lower_priority() -> None:
    """The engine admits by priority, so a request takes the room of earlier requests with lower priority."""
    with in_play(SHAPE._replace(pool_slots=3, priorities=True)) as played:
        for i in range(2):
            played.do(("add", i, 199, 0, 3, 0, 0), ("drain",))
        played.forget()
        side = played.trial.side
        with _busy(played, asks=False):
            played.do(("add", 0, 199, 0, 4, 0, 0), ("add", 1, 199, 0, 2, 0, 0))
            late, urgent = played.trial.scheduler.requests.values()
            assert (late.priority, urgent.priority) == (2, 0)
            side.lookup(late, 0)
            played.do(*STEP * 4)
            assert played.waiting == [m.HELD]
            side.lookup(urgent, 0)
            played.do(*STEP * 4)
            assert played.waiting == [m.OVER, m.HELD]
            assert side.counters["tier_gave_way"] == 1
        played.do(("drain",))


class _Searched(set[Stage]):
    """A list of stages that counts how often it is searched."""

    times = 0

    def __iter__(self) -> Iterator[Stage]:
        """Count the search."""
        self.times += 1
        return super().__iter__()


def test_work_of_a_lookup_does_not_grow_with_waiting_requests() -> None:
    """When waiting requests use all room, a new request does not search their stages for room.

    The new request is not looked up again.
    """
    with in_play(SHAPE._replace(pool_slots=4)) as played:
        for i in range(2):
            played.do(("add", i, 199, 0, 3, 0, 0), ("drain",))
        played.forget()
        side, staging = played.trial.side, played.staging
        with _busy(played, asks=False):
            played.do(ADD, ("add", 1, 199, 0, 3, 0, 0))
            requests = [*played.trial.scheduler.waiting]
            for request in requests:
                side.lookup(request, 0)
            played.do(*STEP * 4, ("late",))
            assert played.waiting == [m.HELD, m.HELD]
            staging._leased = staging._held_max
            stages = staging._stages = _Searched(staging._stages)
            last = side.requests.tracked[requests[1].request_id].stage
            assert last is not None
            assert last.short_at_s < float("inf")
            assert [staging._give_way(last) for _ in range(9)] == [False] * 9
            assert stages.times <= 1
            side.lookup(requests[1], 0)
            full = side.counters["tier_lookup_again"]
            staging._leased -= 1
            played.do(*STEP)
            side.lookup(requests[1], 0)
            assert (full, side.counters["tier_lookup_again"]) == (0, 1)
            staging._leased = side.catalog.leases
        played.do(("drain",))


def test_a_request_that_was_preempted_keeps_its_turn() -> None:
    """The preempted request has precedence over requests that arrived later, although its stage is the newest stage."""
    with in_play() as played:
        side = played.trial.side
        with _busy(played, asks=False):
            played.do(ADD, ("add", 1, 199, 0, 3, 0, 0))
            first, last = (side.requests.add(request) for request in played.trial.scheduler.waiting)
            for tracked in (first, last):
                side.lookup(tracked.request, 0)
            played.do(*STEP * 4)
            side.requests.end_stage(first)  # an admission ends the stage in this way
            side.catalog.reset()
            side.lookup(first.request, 0)
            assert first.stage is not None
            assert last.stage is not None
            assert first.stage.owner.epoch < last.stage.owner.epoch, "numbers of stages fall"
            assert first.stage.precedence < last.stage.precedence
        played.do(("drain",))
