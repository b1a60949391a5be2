"""What the scheduler's side tells: why a lookup missed, and each request's life, once."""

from __future__ import annotations

import time
from typing import Any

import pytest

from kvpipe import misses
from kvpipe.connectors.vllm.tracing import Answer
from kvpipe.misses import Lost
from kvpipe.trace import events as e
from kvpipe.trace.recorder import Recorder
from kvpipe.trace.replay import Replay
from tests.unit.scheduler_world import UNIT, World


class Told(World):
    """A world whose scheduler side is traced."""

    def __init__(self, *, sample: float = 1.0, detail: bool = True, transitions: bool = True, **options: Any) -> None:
        """As `World`."""
        self.recorder = Recorder(lifecycle=True, transitions=transitions, detail=detail, sample=sample)
        self._events: list[Any] = []
        super().__init__(trace=self.recorder, **options)

    @property
    def events(self) -> list[Any]:
        """Everything told so far."""
        self._events += self.recorder.take()
        return self._events

    def told(self, kind: type[e.Event]) -> list[Any]:
        """Events of exactly `kind`."""
        return [one for one in self.events if type(one) is kind]

    def why(self, request: Any, local: int = 0) -> tuple[int, int, str]:
        """Look `request` up; return the hit, what is missed, and why."""
        self.ask(request, local)
        answer = self.side._tracked[request.request_id].life.answer
        assert answer is not None
        return answer.hit, answer.missed, answer.why


# ---- why ------------------------------------------------------------------------------------------------------------


def test_nobody_has_saved_it() -> None:
    """Or not that far."""
    world = World()
    told = Told()
    assert told.why(told.request("new", 4)) == (0, 4 * UNIT, misses.NOT_SAVED)
    told.publish(told.request("old", 4, shared=4))
    assert told.why(told.request("longer", 8, shared=4)) == (4 * UNIT, 4 * UNIT, misses.NOT_SAVED)
    assert world.side.trace is not told.recorder


def test_the_rest_is_too_short() -> None:
    """Less than a unit; and the last token, which vLLM computes itself."""
    told = Told()
    told.publish(told.request("old", 4, shared=4))
    assert told.why(told.request("short", 0, extra=5)) == (0, 5, misses.BELOW_MINIMUM)
    assert told.why(told.request("a little more", 4, shared=4, extra=3)) == (4 * UNIT, 3, misses.BELOW_MINIMUM)
    assert told.why(told.request("the same", 4, shared=4)) == (4 * UNIT - 1, 0, "")
    assert told.why(told.request("vLLM has it", 4, shared=4), 4 * UNIT - 1) == (0, 0, "")


def test_it_is_being_saved() -> None:
    """Not every rank has it yet; then one of them fails."""
    told = Told(ranks=2)
    first = told.request("first", 4, shared=4)
    told.admit(first)
    (save,) = told.step(first)
    second = told.request("second", 4, shared=4)
    assert told.why(second) == (0, 4 * UNIT, misses.BEING_SAVED)
    told.report((save, 1, 1))
    assert told.why(second) == (0, 4 * UNIT, misses.TORN)


@pytest.mark.parametrize("windows", [(None,), (None, 2 * UNIT)])
def test_it_was_evicted_or_reset(windows: tuple[int | None, ...]) -> None:
    """For a group with a window too."""
    told = Told(slots=2 * len(windows), windows=windows, load="async" if len(windows) > 1 else "auto")
    old = told.request("old", 4)
    told.publish(old)
    for i in range(2):
        told.publish(told.request(f"other{i}", 4))
    again = told.request("old", 4)
    assert told.why(again) == (0, 4 * UNIT, misses.EVICTED)
    told.side.reset()
    assert told.why(told.request("other1", 4)) == (0, 4 * UNIT, misses.RESET)


def test_a_reset_while_it_is_being_saved() -> None:
    """What was in flight is forgotten with the rest."""
    told = Told()
    first = told.request("first", 4, shared=4)
    told.admit(first)
    told.step(first)
    told.side.reset()
    assert told.why(told.request("second", 4, shared=4)) == (0, 4 * UNIT, misses.RESET)


def test_what_is_saved_again_is_not_lost_any_more() -> None:
    """The reason of an earlier loss is forgotten."""
    told = Told(slots=1)
    old, other = told.request("old", 4), told.request("other", 4)
    for request in (old, other, told.request("old", 4)):
        told.publish(request)
    assert told.side.catalog.lost_keys.why(0, old.block_hashes[-1]) == misses.NOT_SAVED
    assert told.side.catalog.lost_keys.why(0, other.block_hashes[-1]) == misses.EVICTED


def test_what_vllm_has_is_not_asked_about() -> None:
    """The reason is of what neither has."""
    told = Told(slots=1, chunk_units=2)
    told.publish(told.request("old", 2, shared=2))
    told.publish(told.request("other", 2))
    longer = told.request("longer", 4, shared=2)
    assert told.why(longer) == (0, 4 * UNIT, misses.EVICTED)
    assert told.why(longer, 2 * UNIT) == (0, 2 * UNIT, misses.NOT_SAVED)


def test_a_window_needs_the_last_unit_computed() -> None:
    """A whole prompt that is held, but for the unit that is given back."""
    told = Told(windows=(None, 2 * UNIT), load="async")
    told.publish(told.request("old", 4, shared=4))
    assert told.why(told.request("same", 4, shared=4)) == (3 * UNIT, UNIT, misses.BELOW_MINIMUM)


def test_a_load_that_never_came() -> None:
    """Nothing was loaded, and it was waited for until the end."""
    told = Told(load="async", ranks=2)
    told.publish(told.request("old", 4, shared=4))
    failing, leaving = told.request("failing", 6, shared=4), told.request("leaving", 6, shared=4)
    told.admit(failing)
    (load,) = told.step()
    told.report((load, 1, 1))
    told.admit(leaving)
    told.step()
    told.side.finished(failing)
    time.sleep(0.005)
    told.side.finished(leaving)
    first, second = told.told(e.RequestDone)[-2:]
    assert (first.loaded_tokens, first.loads_failed) == (0, 1)
    assert (second.loaded_tokens, second.loads_failed) == (0, 0)
    assert second.loading_ms >= 5


def test_kvpipe_does_not_load_for_it() -> None:
    """A producer; a bypassed engine; a request whose load failed; a lost tier."""
    assert Told(loads=False).why(Told().request("r", 4)) == (0, 4 * UNIT, misses.NO_CONSUMER)
    told = Told()
    told.publish(told.request("old", 4, shared=4))
    told.side.bypass = True
    assert told.why(told.request("bypassed", 5, shared=4)) == (0, 5 * UNIT, misses.BYPASS)
    told.side.bypass = False
    failing = told.request("failing", 5, shared=4)
    told.admit(failing)
    load, *saves = told.step(failing)
    told.report((load, 0, 1), *((save, 1, 0) for save in saves))
    told.preempt(failing)
    assert told.why(failing) == (0, 5 * UNIT, misses.LOAD_FAILED)
    told.side.tier_lost = True
    late = told.request("late", 5, shared=4)
    assert told.why(late) == (0, 5 * UNIT, misses.TIER_DOWN)
    told.admit(late)
    assert told.step(late) == [], "nothing is saved where nothing can be kept"


def test_there_is_no_room() -> None:
    """Asked to come back, until it is given up."""
    told = Told(load="async")
    told.publish(told.request("old", 4, shared=4))
    first, second = told.request("first", 6, shared=4), told.request("second", 8, shared=4)
    told.admit(first)
    del told.tables[0]["first"][4:]  # vLLM gives it no more than the load needs
    told.step()
    told.free = 3
    assert told.side.lookup(second, 0) == (None, False)
    answer = told.side._tracked["second"].life.answer
    assert answer == Answer(0, 0, 8 * UNIT, misses.NO_ROOM, later=True)


def test_what_is_remembered_is_bounded() -> None:
    """The oldest is forgotten first."""
    lost = Lost(keys_max=3)
    for i in range(5):
        lost.add(0, bytes([i]), misses.EVICTED)
    assert [lost.why(0, bytes([i])) for i in range(5)] == [misses.NOT_SAVED] * 2 + [misses.EVICTED] * 3
    assert len(lost.reasons) == 3


# ---- a life ---------------------------------------------------------------------------------------------------------


def test_a_life_with_a_preemption() -> None:
    """Two events at `info`; the rest is told where there is a trace, and replays."""
    told = Told()
    told.publish(told.request("old", 4, shared=4))
    told.events.clear()
    request = told.request("r", 6, shared=4)
    request.trace_headers = {"traceparent": "00-abc-def-01"}
    told.admit(request)
    load, save = told.step(request)
    told.succeed(load, save)
    told.preempt(request)
    told.admit(request)
    told.succeed(*told.step(request))
    told.side.finished(request)
    (added,) = told.told(e.RequestAdded)
    assert (added.prompt_tokens, added.traceparent) == (6 * UNIT, "00-abc-def-01")
    (admitted,) = told.told(e.RequestAdmitted)
    assert (admitted.hit_tokens, admitted.missed_tokens) == ({"memory": 4 * UNIT}, 2 * UNIT)
    assert (admitted.why, admitted.load) == (misses.NOT_SAVED, "load_sync")
    (again,) = told.told(e.RequestReadmitted)
    assert again.hit_tokens == {"memory": 6 * UNIT - 1}
    (done,) = told.told(e.RequestDone)
    assert (done.loaded_tokens, done.saved_pages, done.preemptions) == (10 * UNIT - 1, 2, 1)
    assert (done.prompt_tokens, done.output_tokens, done.loads_failed) == (6 * UNIT, 0, 0)
    assert (
        [one.chunks for one in told.told(e.LeasesTaken)]
        == [one.chunks for one in told.told(e.LeasesReturned)]
        == [1, 1]
    )
    assert [one.tokens for one in told.told(e.LoadPlanned)] == [4 * UNIT, 6 * UNIT - 1]
    assert [one.pages for one in told.told(e.SavePlanned)] == [2]
    assert told.told(e.Resumed)
    assert {one.request for one in told.events} == {"r"}
    assert sum(one.level >= e.INFO for one in told.events) == 2


def test_the_trace_of_a_world_replays() -> None:
    """Requests and chunks, an id that is used again, an eviction."""
    told = Told(slots=3)
    for i in range(6):
        told.publish(told.request(f"r{i % 4}", 4))
    done = Replay()
    done.feed(e.Started(0, -1, "", 0, 0))
    for one in told.events:
        done.feed(one)
    assert done.problems == []
    assert told.told(e.Evicted)
    assert len({one.cursor for one in told.events if isinstance(one, e.Running)}) == 6


def test_a_lookup_is_told_when_its_answer_changes() -> None:
    """VLLM asks in every step while a request waits."""
    told = Told()
    request = told.request("r", 6, shared=4)
    for _ in range(5):
        told.ask(request)
    told.publish(told.request("old", 4, shared=4))
    for _ in range(5):
        told.ask(request)
    mine = [one for one in told.told(e.Lookup) if one.request == "r"]
    assert [one.hit_tokens for one in mine] == [{}, {"memory": 4 * UNIT}]
    told.admit(request)
    told.preempt(request)
    told.ask(request)
    assert told.told(e.Lookup)[-1].hit_tokens == {"memory": 4 * UNIT}, "a new admission is asked for"
    assert len([one for one in told.told(e.Lookup) if one.request == "r"]) == 3


def test_without_a_trace_only_the_two_lines_are_told() -> None:
    """Nothing else is made for nobody."""
    told = Told(transitions=False, detail=False)
    told.publish(told.request("old", 4))
    assert [type(one) for one in told.events] == [e.RequestAdmitted, e.RequestDone]
    assert all(tracked.watch is None for tracked in told.side._tracked.values())
    assert told.side.catalog.watch is None


def test_who_is_not_in_the_sample_is_told_of_in_two_lines() -> None:
    """And its chunks, which are not one request's."""
    told = Told(sample=0.0)
    told.publish(told.request("old", 4))
    kinds = {type(one) for one in told.events if one.request}
    assert kinds - {e.Reserved, e.Published} == {e.RequestAdmitted, e.RequestDone}


def test_hits_and_misses_are_counted_at_admission() -> None:
    """Once per admission, however often vLLM asks."""
    told = Told()
    told.publish(told.request("old", 4, shared=4))
    request = told.request("r", 6, shared=4)
    for _ in range(5):
        told.ask(request)
    told.admit(request)
    totals = told.side.totals()
    assert totals["hit_tokens"] == {"memory": 4 * UNIT}
    assert totals["misses"] == {misses.NOT_SAVED: 2}
    assert totals["missed_tokens"] == {misses.NOT_SAVED: 6 * UNIT}
    assert totals["leases"] == {"": 1}
    assert totals["oldest_lease_seconds"][""] > 0
    assert totals["jobs_in_flight"] == {"": 1}
