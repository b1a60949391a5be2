"""Spans that no hit and no step may cut, such as images whose tokens attend to each other in both directions."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvpipe.cache.prefixes import uncut
from kvpipe.protocol.engine import Request, WholeSpan
from kvpipe.protocol.messages import Job
from tests.rigs.scheduler_world import SAVE, UNIT, SchedulerWorld

IMAGE: WholeSpan = (2 * UNIT + 4, 5 * UNIT - 3)
"""A span in units 2, 3 and 4. Neither of its ends is the end of a unit."""


def _world(*spans: WholeSpan, windows: tuple[int | None, ...] = (None,), **kwargs: Any) -> SchedulerWorld:
    def of(request: Request) -> list[WholeSpan]:
        return [] if request.request_id == "text" else list(spans)

    return SchedulerWorld(spans_of=of, chunk_units=4, windows=windows, **kwargs)


def _step(world: SchedulerWorld, request: Any, tokens: int) -> list[Job]:
    """Schedule `tokens` tokens of `request`, and complete the jobs of the step."""
    jobs: list[Job] = []
    plan = world.side.plan_step(_Step({request.request_id: tokens}))
    for job in plan.jobs:
        jobs.append(job)
        for group, slot, page, block in job.table().tolist() if job.kind == SAVE else ():
            table = world.tables[group][request.request_id]
            unit = next(at for at, held in enumerate(table) if held.block_id == block)
            world.pages[slot, page] = request.block_hashes[unit]
    request.num_computed_tokens += tokens
    world.succeed(*jobs)
    return jobs


class _Step:
    def __init__(self, scheduled: dict[str, int], preempted: set[str] | None = None) -> None:
        self.num_scheduled_tokens, self.preempted_req_ids = scheduled, preempted
        self.kv_connector_block_state = None


def test_a_prefix_is_shortened_to_the_start_of_the_span_that_it_cuts() -> None:
    """A prefix that ends at the beginning or at the end of a span does not cut the span."""
    spans = [(4, 8), (8, 12), (20, 30)]
    cut = dict.fromkeys(range(5, 8), 4) | dict.fromkeys(range(9, 12), 8) | dict.fromkeys(range(21, 30), 20)
    assert [uncut(spans, tokens) for tokens in range(40)] == [cut.get(tokens, tokens) for tokens in range(40)]


@pytest.mark.parametrize("windows", [(None,), (None, 2 * UNIT)], ids=["full", "window"])
@pytest.mark.parametrize("held", range(1, 9))
def test_a_hit_ends_before_the_span_that_it_would_cut(held: int, windows: tuple[int | None, ...]) -> None:
    """The units of an image are either all loaded or all not loaded."""
    world = _world(IMAGE, windows=windows, load="async")
    world.publish(world.request("text", held, shared=held))
    hit = world.ask(world.request("new", 12, shared=held))
    assert hit == (2 * UNIT if 3 <= held <= 4 else held * UNIT)
    asking = world.side.requests.tracked["new"].asking
    assert asking.why == ("below_minimum" if 3 <= held <= 4 else "not_saved")


def test_a_hit_ends_inside_a_span_when_the_engine_has_none() -> None:
    """An engine whose images attend only to earlier tokens reports no spans.

    Such an engine keeps a hit that ends inside an image.
    """
    world = SchedulerWorld(chunk_units=4)
    world.publish(world.request("text", 3, shared=3))
    assert world.ask(world.request("new", 12, shared=3)) == 3 * UNIT


def test_nothing_behind_a_cut_is_saved() -> None:
    """The step ends inside the image. KV from the image on is wrong. Earlier KV is right, and is saved."""
    world = _world(IMAGE)
    request = world.request("new", 12)
    world.side.admitted(request, world.allocate(request), world.ask(request))
    _step(world, request, 3 * UNIT)
    assert world.found(request) == 2
    assert _step(world, request, 9 * UNIT) == []
    world.side.finished(request)
    assert world.found(request) == 2
    assert world.side.counters["spans_cut"] == 1


def test_all_units_are_saved_when_each_span_is_computed_in_one_step() -> None:
    """A step may begin inside an image if vLLM's own cache holds the image's first part.

    The rest of the image then attends to the whole image.
    """
    world = _world(IMAGE, (7 * UNIT, 8 * UNIT))
    request = world.request("new", 12)
    world.admit_local(request, 3 * UNIT)
    for tokens in (4 * UNIT, UNIT, 4 * UNIT):
        _step(world, request, tokens)
    assert world.found(request) == 12
    assert not world.forgotten
    assert not world.side.counters["spans_cut"]


def test_a_span_that_a_local_hit_cuts_is_wrong_from_where_its_rest_is_cut() -> None:
    """The engine continues inside the image, and splits the rest of the image.

    Only the rest of the image has wrong KV.
    """
    world = _world(IMAGE)
    request = world.request("new", 12)
    world.admit_local(request, 3 * UNIT)
    _step(world, request, UNIT)
    _step(world, request, 8 * UNIT)
    assert world.found(request) == 3


def test_wrong_kv_leaves_the_engines_own_cache() -> None:
    """Wrong blocks are removed from vLLM's cache.

    This is repeated at the request's end, as vLLM may cache the blocks again.
    """
    world = _world(IMAGE)
    request = world.request("new", 12)
    world.side.admitted(request, world.allocate(request), world.ask(request))
    _step(world, request, 3 * UNIT)
    blocks = [block.block_id for block in world.tables[0]["new"]]
    assert world.forgotten == set(blocks[2:])
    world.grow(request, 14)
    _step(world, request, 11 * UNIT)
    wrong = {block.block_id for block in world.tables[0]["new"][2:]}
    assert world.forgotten == wrong
    world.forgotten.clear()
    world.side.finished(request)
    assert world.forgotten == wrong


def test_a_request_that_shares_wrong_blocks_saves_nothing() -> None:
    """The scheduling pass that has cut the span may also have given its wrong blocks to this request."""
    world = _world(IMAGE)
    first, other = world.request("first", 12, shared=12), world.request("text", 14, shared=12)
    world.side.admitted(first, world.allocate(first), world.ask(first))
    _step(world, first, 3 * UNIT)
    world.tables[0]["text"] = world.tables[0]["first"][:4]
    world.side.admitted(other, world.allocate(other), world.ask(other, 4 * UNIT))
    other.num_computed_tokens = 4 * UNIT
    assert _step(world, other, 10 * UNIT) == []
    world.forgotten.clear()
    world.side.finished(other)
    assert {block.block_id for block in world.tables[0]["text"][2:]} <= world.forgotten


def test_a_preempted_request_is_saved_again() -> None:
    """The wrong blocks are gone. No span is cut in the blocks of the request's new admission."""
    world = _world(IMAGE)
    request = world.request("new", 12)
    world.side.admitted(request, world.allocate(request), world.ask(request))
    _step(world, request, 3 * UNIT)
    wrong = {block.block_id for block in world.tables[0]["new"][2:]}
    world.preempt(request)
    world.forgotten.clear()
    world.side.plan_step(_Step({}, {"new"}))  # type: ignore[arg-type]
    assert world.forgotten == wrong
    world.side.admitted(request, world.allocate(request), world.ask(request))
    _step(world, request, 12 * UNIT)
    assert world.found(request) == 12


def test_input_that_comes_later_has_spans_of_its_own() -> None:
    """A session's next turn may be the first turn with an image."""
    turns: list[WholeSpan] = []
    world = SchedulerWorld(spans_of=lambda _: turns, chunk_units=4)
    request = world.request("session", 4)
    world.side.admitted(request, world.allocate(request), world.ask(request))
    _step(world, request, 4 * UNIT)
    turns.append((5 * UNIT, 8 * UNIT))
    world.grow(request, 12)
    world.side.admitted(request, world.allocate(request), 0)
    _step(world, request, 3 * UNIT)
    assert world.found(request) == 5


def test_nothing_is_saved_when_cuts_cannot_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing chunk is only a miss, but a wrong chunk is a wrong answer."""
    world = _world(IMAGE)
    request = world.request("new", 12)
    world.side.admitted(request, world.allocate(request), world.ask(request))
    monkeypatch.setattr(world.blocks, "forget", lambda _: (_ for _ in ()).throw(RuntimeError))
    assert _step(world, request, 3 * UNIT) == []
    assert _step(world, request, 9 * UNIT) == []
    assert world.side.counters["contained_error"] >= 1


def test_nothing_is_saved_when_spans_cannot_be_read() -> None:
    """An engine's media may be any objects. So reading their spans may raise an exception, which is contained."""

    def of(_request: Request) -> list[WholeSpan]:
        raise TypeError

    world = SchedulerWorld(chunk_units=4, spans_of=of)
    request = world.request("new", 12)
    world.side.admitted(request, world.allocate(request), 0)
    assert _step(world, request, 12 * UNIT) == []
    assert world.side.counters["contained_error"] == 1


def test_work_is_bounded_when_no_request_has_spans() -> None:
    """Each step reads only requests whose remaining tokens have spans."""
    world = _world(IMAGE)
    text = world.request("text", 12)
    world.side.admitted(text, world.allocate(text), world.ask(text))
    spans = world.side._spans
    assert spans is not None
    assert (spans._ahead, spans.cut) == ({}, {})
    image = world.request("new", 12)
    world.side.admitted(image, world.allocate(image), world.ask(image))
    assert set(spans._ahead) == {"new"}
    _step(world, image, 12 * UNIT)
    assert not spans._ahead


@pytest.mark.parametrize("seed", range(20))
def test_units_are_saved_exactly_when_they_have_seen_all_of_their_spans(seed: int) -> None:
    """An oracle checks random spans and steps: a unit is saved if it ends before the first wrong token."""
    rng = random.Random(seed)
    ends = sorted(rng.sample(range(1, 20 * UNIT), 6))
    spans = [(ends[0], ends[1]), (ends[2], ends[3]), (ends[4], ends[5])]
    world = _world(*spans)
    request = world.request("new", 20)
    world.side.admitted(request, world.allocate(request), world.ask(request))
    right, start = 20 * UNIT, 0
    while start < 20 * UNIT:
        stop = min(20 * UNIT, start + rng.randint(1, 8 * UNIT))
        cut = [max(start, first) for first, last in spans if first < stop < last]
        right = min([right, *cut])
        _step(world, request, stop - start)
        start = stop
    assert world.found(request) == right // UNIT
