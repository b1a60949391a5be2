"""The scheduler side records the reason of each miss, and each event of a request's life once."""

from __future__ import annotations

import gc
import time
import weakref
from typing import Any

import pytest

from kvpipe.protocol.engine import LATER
from kvpipe.scheduler.gauges import totals
from kvpipe.scheduler.records import LookupResult
from kvpipe.trace import events as e
from kvpipe.trace import miss_reasons, transitions
from kvpipe.trace.miss_reasons import LostKeys
from kvpipe.trace.recorder import Recorder
from kvpipe.trace.replay import Replay
from tests.rigs.scheduler_world import UNIT, SchedulerWorld


class Noted(SchedulerWorld):
    """A world whose scheduler side is traced."""

    def __init__(self, *, sample: float = 1.0, detail: bool = True, transitions: bool = True, **options: Any) -> None:
        """Make the world with the arguments of `SchedulerWorld`."""
        self.recorder = Recorder(lifecycle=True, transitions=transitions, detail=detail, sample=sample)
        self._events: list[Any] = []
        super().__init__(trace=self.recorder, **options)

    @property
    def events(self) -> list[Any]:
        """All events recorded so far."""
        self._events += self.recorder.take()
        return self._events

    def noted(self, kind: type[e.Event]) -> list[Any]:
        """Events of exactly `kind`."""
        return [one for one in self.events if type(one) is kind]

    def why(self, request: Any, local: int = 0) -> tuple[int, int, str]:
        """Look up `request`. Return the number of tokens that hit, the number of tokens that missed, and the reason."""
        self.ask(request, local)
        answer = self.side.requests.tracked[request.request_id].asking.answer
        return answer.hit, answer.missed, answer.why


# ---- why ------------------------------------------------------------------------------------------------------------


def test_reason_is_not_saved_when_no_request_has_saved_the_prompt() -> None:
    """The reason is `not_saved` if no request has saved the prompt, or if a request has saved only a shorter prefix."""
    world = SchedulerWorld()
    reported = Noted()
    assert reported.why(reported.request("new", 4)) == (0, 4 * UNIT, miss_reasons.NOT_SAVED)
    reported.publish(reported.request("old", 4, shared=4))
    assert reported.why(reported.request("longer", 8, shared=4)) == (4 * UNIT, 4 * UNIT, miss_reasons.NOT_SAVED)
    assert world.side.trace is not reported.recorder


def test_reason_is_too_short_when_the_rest_is_too_short() -> None:
    """If fewer tokens than a unit are missing, the reason is `below_minimum`.

    The prompt's last token is not counted.
    """
    reported = Noted()
    reported.publish(reported.request("old", 4, shared=4))
    assert reported.why(reported.request("short", 0, extra=5)) == (0, 5, miss_reasons.BELOW_MINIMUM)
    assert reported.why(reported.request("a little more", 4, shared=4, extra=3)) == (
        4 * UNIT,
        3,
        miss_reasons.BELOW_MINIMUM,
    )
    assert reported.why(reported.request("the same", 4, shared=4)) == (4 * UNIT - 1, 0, "")
    assert reported.why(reported.request("vLLM has it", 4, shared=4), 4 * UNIT - 1) == (0, 0, "")


def test_no_load_is_made_for_the_block_that_vllm_drops_of_its_own_hit() -> None:
    """vLLM drops the last block of its own hit.

    The next step computes this block, so no load is made for it alone. Longer hits are loaded.
    """
    noted = Noted(windows=(None, 2 * UNIT), load="async", dropped_units=1)
    noted.publish(noted.request("old", 5, shared=5))
    again = noted.request("again", 5, shared=5, extra=1)
    assert noted.why(again, 4 * UNIT) == (0, UNIT + 1, miss_reasons.BELOW_MINIMUM)
    assert noted.why(again, 3 * UNIT) == (2 * UNIT, 1, miss_reasons.BELOW_MINIMUM)
    noted.publish(noted.request("short", 1))
    assert noted.why(noted.request("short", 1, extra=1)) == (UNIT, 1, miss_reasons.BELOW_MINIMUM)
    in_step = Noted(dropped_units=1)  # a sync load needs no additional step, so it is made
    in_step.publish(in_step.request("old", 5, shared=5))
    in_step_again = in_step.request("again", 5, shared=5, extra=1)
    assert in_step.why(in_step_again, 4 * UNIT) == (UNIT, 1, miss_reasons.BELOW_MINIMUM)


def test_reason_is_being_saved_until_every_rank_has_the_chunk() -> None:
    """The reason is `being_saved` until every rank has the chunk. After a rank has failed, the reason is `torn`."""
    reported = Noted(ranks=2)
    first = reported.request("first", 4, shared=4)
    reported.admit(first)
    (save,) = reported.step(first)
    second = reported.request("second", 4, shared=4)
    assert reported.why(second) == (0, 4 * UNIT, miss_reasons.BEING_SAVED)
    reported.report((save, 1, 1))
    assert reported.why(second) == (0, 4 * UNIT, miss_reasons.TORN)


@pytest.mark.parametrize("windows", [(None,), (None, 2 * UNIT)])
def test_reason_is_evicted_or_reset(windows: tuple[int | None, ...]) -> None:
    """The reasons `evicted` and `reset` also apply to a group with a window."""
    reported = Noted(slots=2 * len(windows), windows=windows, load="async" if len(windows) > 1 else "auto")
    old = reported.request("old", 4)
    reported.publish(old)
    for i in range(2):
        reported.publish(reported.request(f"other{i}", 4))
    again = reported.request("old", 4)
    assert reported.why(again) == (0, 4 * UNIT, miss_reasons.EVICTED)
    reported.side.reset()
    assert reported.why(reported.request("other1", 4)) == (0, 4 * UNIT, miss_reasons.RESET)


def test_reason_is_reset_for_a_chunk_with_a_save_in_flight() -> None:
    """A reset also forgets a chunk whose save is in flight."""
    reported = Noted()
    first = reported.request("first", 4, shared=4)
    reported.admit(first)
    reported.step(first)
    reported.side.reset()
    assert reported.why(reported.request("second", 4, shared=4)) == (0, 4 * UNIT, miss_reasons.RESET)


def test_reason_of_an_eviction_is_forgotten_when_the_chunk_is_saved_again() -> None:
    """When a chunk is saved again, the reason of its earlier eviction is forgotten."""
    reported = Noted(slots=1)
    old, other = reported.request("old", 4), reported.request("other", 4)
    for request in (old, other, reported.request("old", 4)):
        reported.publish(request)
    assert reported.side.catalog.lost_keys.why(0, old.block_hashes[-1]) == miss_reasons.NOT_SAVED
    assert reported.side.catalog.lost_keys.why(0, other.block_hashes[-1]) == miss_reasons.EVICTED


def test_reason_is_that_of_the_first_token_that_vllm_lacks() -> None:
    """The first token that neither vLLM nor kvpipe holds decides the reason of a miss."""
    reported = Noted(slots=1, chunk_units=2)
    reported.publish(reported.request("old", 2, shared=2))
    reported.publish(reported.request("other", 2))
    longer = reported.request("longer", 4, shared=2)
    assert reported.why(longer) == (0, 4 * UNIT, miss_reasons.EVICTED)
    assert reported.why(longer, 2 * UNIT) == (0, 2 * UNIT, miss_reasons.NOT_SAVED)


def test_a_window_needs_the_last_unit_computed() -> None:
    """A whole prompt is in memory. With a window, all of it is a hit except the last unit."""
    reported = Noted(windows=(None, 2 * UNIT), load="async")
    reported.publish(reported.request("old", 4, shared=4))
    assert reported.why(reported.request("same", 4, shared=4)) == (3 * UNIT, UNIT, miss_reasons.BELOW_MINIMUM)


def test_reason_of_a_load_that_was_not_made() -> None:
    """A request's load fails or never ends.

    Such a request has no loaded tokens, and its whole time until its end counts as waiting.
    """
    reported = Noted(load="async", ranks=2)
    reported.publish(reported.request("old", 4, shared=4))
    failing, leaving = reported.request("failing", 6, shared=4), reported.request("leaving", 6, shared=4)
    reported.admit(failing)
    (load,) = reported.step()
    reported.report((load, 1, 1))
    reported.admit(leaving)
    reported.step()
    reported.side.finished(failing)
    time.sleep(0.005)
    reported.side.finished(leaving)
    first, second = reported.noted(e.RequestDone)[-2:]
    assert (first.loaded_tokens, first.loads_failed) == (0, 1)
    assert (second.loaded_tokens, second.loads_failed) == (0, 0)
    assert second.loading_ms >= 5


def test_reason_is_named_when_kvpipe_does_not_load() -> None:
    """A producer, a bypassed engine, a failed load and a lost tier have their own reasons."""
    assert Noted(loads=False).why(Noted().request("r", 4)) == (0, 4 * UNIT, miss_reasons.NO_CONSUMER)
    reported = Noted()
    reported.publish(reported.request("old", 4, shared=4))
    reported.side.switches.bypass = True
    assert reported.why(reported.request("bypassed", 5, shared=4)) == (0, 5 * UNIT, miss_reasons.BYPASS)
    reported.side.switches.bypass = False
    failing = reported.request("failing", 5, shared=4)
    reported.admit(failing)
    load, *saves = reported.step(failing)
    reported.report((load, 0, 1), *((save, 1, 0) for save in saves))
    reported.preempt(failing)
    assert reported.why(failing) == (0, 5 * UNIT, miss_reasons.LOAD_FAILED)
    reported.side.switches.tier_lost = True
    late = reported.request("late", 5, shared=4)
    assert reported.why(late) == (0, 5 * UNIT, miss_reasons.TIER_DOWN)
    reported.admit(late)
    assert reported.step(late) == [], "nothing is saved where nothing can be kept"


def test_reason_is_no_room_after_some_repeated_lookups() -> None:
    """Without free blocks, kvpipe asks vLLM to repeat the lookup. After some repetitions the answer is a miss."""
    reported = Noted(load="async")
    reported.publish(reported.request("old", 4, shared=4))
    first, second = reported.request("first", 6, shared=4), reported.request("second", 8, shared=4)
    reported.admit(first)
    del reported.tables[0]["first"][4:]  # vLLM allocates only the blocks that the load needs
    reported.step()
    reported.free = 3
    assert reported.side.lookup(second, 0) is LATER
    answer = reported.side.requests.tracked["second"].asking.answer
    assert answer == LookupResult(0, 0, 8 * UNIT, miss_reasons.NO_ROOM, later=True)


def test_remembered_reasons_are_bounded() -> None:
    """If too many reasons are remembered, the oldest reason is forgotten first."""
    lost = LostKeys(keys_max=3)
    for i in range(5):
        lost.add(0, bytes([i]), miss_reasons.EVICTED)
    assert [lost.why(0, bytes([i])) for i in range(5)] == [miss_reasons.NOT_SAVED] * 2 + [miss_reasons.EVICTED] * 3
    assert [len(part) for part in lost.reasons[0]] == [3]


# ---- a life ---------------------------------------------------------------------------------------------------------


def test_a_life_with_a_preemption() -> None:
    """At the level `info`, a request has two events. The trace has all events, and the replay finds no problem."""
    reported = Noted()
    reported.publish(reported.request("old", 4, shared=4))
    reported.events.clear()
    request = reported.request("r", 6, shared=4)
    request.trace_headers = {"traceparent": "00-abc-def-01"}
    reported.admit(request)
    load, save = reported.step(request)
    reported.succeed(load, save)
    reported.preempt(request)
    reported.admit(request)
    reported.succeed(*reported.step(request))
    reported.side.finished(request)
    (added,) = reported.noted(e.RequestAdded)
    assert (added.prompt_tokens, added.traceparent) == (6 * UNIT, "00-abc-def-01")
    (admitted,) = reported.noted(e.RequestAdmitted)
    assert (admitted.hit_tokens, admitted.missed_tokens) == ({"memory": 4 * UNIT}, 2 * UNIT)
    assert (admitted.why, admitted.load) == (miss_reasons.NOT_SAVED, "load_sync")
    (again,) = reported.noted(e.RequestReadmitted)
    assert again.hit_tokens == {"memory": 6 * UNIT - 1}
    (done,) = reported.noted(e.RequestDone)
    assert (done.loaded_tokens, done.saved_pages, done.preemptions) == (10 * UNIT - 1, 2, 1)
    assert (done.prompt_tokens, done.output_tokens, done.loads_failed) == (6 * UNIT, 0, 0)
    assert (
        [one.chunks for one in reported.noted(e.LeasesTaken)]
        == [one.chunks for one in reported.noted(e.LeasesReturned)]
        == [1, 1]
    )
    assert [one.tokens for one in reported.noted(e.LoadPlanned)] == [4 * UNIT, 6 * UNIT - 1]
    assert [one.pages for one in reported.noted(e.SavePlanned)] == [2]
    assert reported.noted(transitions.Resumed)
    assert {one.request for one in reported.events} == {"r"}
    assert sum(one.level >= e.INFO for one in reported.events) == 2


def test_the_trace_of_a_world_replays() -> None:
    """A trace with requests, chunks, a reused id and an eviction replays without a problem."""
    reported = Noted(slots=3)
    for i in range(6):
        reported.publish(reported.request(f"r{i % 4}", 4))
    done = Replay()
    done.feed(e.Started(0, -1, "", 0, 0))
    for one in reported.events:
        done.feed(one)
    assert done.problems == []
    assert reported.noted(transitions.Evicted)
    assert len({one.cursor for one in reported.events if isinstance(one, transitions.Running)}) == 6


def test_a_lookup_is_reported_when_its_answer_changes() -> None:
    """A waiting request repeats its lookup. A lookup is recorded only if its answer has changed."""
    reported = Noted()
    request = reported.request("r", 6, shared=4)
    for _ in range(5):
        reported.ask(request)
    reported.publish(reported.request("old", 4, shared=4))
    for _ in range(5):
        reported.ask(request)
    mine = [one for one in reported.noted(e.Lookup) if one.request == "r"]
    assert [one.hit_tokens for one in mine] == [{}, {"memory": 4 * UNIT}]
    reported.admit(request)
    reported.step()
    reported.preempt(request)
    reported.ask(request)
    assert reported.noted(e.Lookup)[-1].hit_tokens == {"memory": 4 * UNIT}, "a new admission is asked for"
    assert len([one for one in reported.noted(e.Lookup) if one.request == "r"]) == 3


def test_dropped_side_with_a_trace_is_freed() -> None:
    """The watch of a chunk has no strong reference to the scheduler side, so a dropped side is freed."""
    reported = Noted()
    reported.publish(reported.request("old", 4))
    (chunk,) = {*reported.side.catalog.index(0).values()}
    assert chunk.watch is not None
    gone = weakref.ref(reported.side.catalog)
    del reported, chunk
    gc.collect()
    assert gone() is None


def test_without_a_trace_only_the_two_lines_are_reported() -> None:
    """Without a trace, only the events of the two lines per request are made."""
    reported = Noted(transitions=False, detail=False)
    reported.publish(reported.request("old", 4))
    assert [type(one) for one in reported.events] == [e.RequestAdmitted, e.RequestDone]
    assert reported.side.catalog.watch is None


def test_request_outside_the_sample_is_reported_in_two_lines() -> None:
    """A request outside the sample has only the two lines. Its chunks are not traced."""
    reported = Noted(sample=0.0)
    reported.publish(reported.request("old", 4))
    kinds = {type(one) for one in reported.events if one.request}
    assert kinds - {transitions.Reserved, transitions.ChunkPublished} == {e.RequestAdmitted, e.RequestDone}


def test_hits_and_misses_are_counted_at_admission() -> None:
    """Hits and misses are counted once per admission, even if vLLM repeats lookups."""
    reported = Noted()
    reported.publish(reported.request("old", 4, shared=4))
    request = reported.request("r", 6, shared=4)
    for _ in range(5):
        reported.ask(request)
    reported.admit(request)
    metrics = totals(reported.side)
    assert metrics["hit_tokens"] == {"memory": 4 * UNIT}
    assert metrics["misses"] == {miss_reasons.NOT_SAVED: 2}
    assert metrics["missed_tokens"] == {miss_reasons.NOT_SAVED: 6 * UNIT}
    assert metrics["leases"] == {"": 1}
    assert metrics["oldest_lease_seconds"][""] > 0
    assert metrics["jobs_in_flight"] == {"": 1}
