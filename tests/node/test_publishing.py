"""An engine publishes each chunk once: when it has landed on all ranks, and its request adds no more units to it."""

from __future__ import annotations

from typing import Any

from kvpipe.cache.chunks import Chunk
from kvpipe.protocol.messages import Job
from kvpipe.scheduler.notified import NotedChunks
from tests.node.test_catalog import Worlds


def test_last_part_of_a_request_is_published_when_the_request_ends(worlds: Worlds) -> None:
    """While the request decodes, its last chunk grows in one slot.

    Until then it is found up to the prompt's end only.
    """
    first, second = worlds.start(stock=4), worlds.start()
    one = first.request("one", 6, shared=16)
    first.requests = [one]
    first.admit(one)
    saved = list[Job]()
    for units in range(6, 12):
        first.grow(one, units)
        jobs = first.step(one)
        saved += jobs
        for job in jobs:
            first.end(job)
        first.step()
        first.step()
        second.step()
        assert second.found(second.request(str(units), 16, shared=16)) == max(6, units // 4 * 4)
    first.side.finished(one)
    assert first.side.pending
    first.step()
    first.step()
    second.step()
    again = second.request("again", 11, shared=16, extra=1)
    assert second.ask(again) == 11 * 16
    second.run(again)
    assert sum(len(job.table()) for job in saved) == 11 + 2, "only the prompt's last part is copied again"
    assert worlds.node.keeper.usage().published == 4
    first.check()


def test_growing_chunk_gets_one_note_when_it_is_reported(worlds: Worlds) -> None:
    """A note has all tokens of the chunk, so a note for each piece costs much more."""
    first = worlds.start(stock=4)
    notes = list[tuple[int, int]]()

    def note_of(_: Any, chunk: Chunk, base: int) -> bytes:
        notes.append((base, chunk.marks[-1].units))
        return b"note"

    assert first.side.node is not None
    routers = NotedChunks(first.side.node, note_of)
    first.side.node.notes.on_report = routers.reported
    first.side.events.subscribe([first.side.pins, routers])
    one = first.request("one", 6, extra=1)
    first.begin(one, *range(6, 12))
    assert notes == [(0, 4), (4, 2), (4, 4)], "full chunks, and the end of the prompt"
    first.side.finished(one)
    first.step()
    assert notes[3:] == [(8, 3)]
    first.check()


def test_last_part_of_a_preempted_request_is_published(worlds: Worlds) -> None:
    """The request finds this chunk when it is admitted again."""
    first = worlds.start(stock=4)
    one = first.request("one", 6)
    first.begin(one, 6, 7)
    first.preempt(one)
    first.side.requests.notice_preemption(first.side.requests.tracked["one"])
    first.step()
    first.step()
    assert first.found(one) == 7
    first.check()


def test_parts_before_a_failed_part_are_published(worlds: Worlds) -> None:
    """The parts before the failed part are published. The rest is saved into another slot."""
    first = worlds.start(stock=4)
    one = first.request("one", 4, extra=1)
    first.requests = [one]
    first.admit(one)
    for units, ok in ((5, True), (6, True), (7, False), (8, True)):
        first.grow(one, units)
        for job in first.step(one):
            first.end(job, ok=ok)
        first.check()
    first.step()
    first.step()
    assert first.found(one) == 8
    assert worlds.node.keeper.usage().published == 3
    first.check()


def test_failed_save_is_never_found_and_returns_its_slot(worlds: Worlds) -> None:
    """The slot is free for the next save."""
    first = worlds.start(stock=4)
    one = first.request("one", 8)
    first.requests = [one]
    first.admit(one)
    (job,) = first.step(one)
    free = first.pool.stock.free
    first.end(job, ok=False)
    assert first.pool.stock.free == free + 2
    first.step()
    assert first.found(one) == 0


def test_second_copy_of_a_chunk_keeps_its_slot(worlds: Worlds) -> None:
    """Two engines compute the same prompt at once. The first report is published, and no slot is lost."""
    first, second = worlds.start(), worlds.start()
    asked = [world.request("same", 8, shared=8) for world in (first, second)]
    jobs = []
    for world, request in zip((first, second), asked, strict=True):
        world.requests = [request]
        world.admit(request)
        jobs += world.step(request)
    first.end(jobs[0])
    second.end(jobs[1])
    for world in (first, second) * 4:
        world.step()
    usage = worlds.node.keeper.usage()
    assert usage.published == 2
    assert usage.granted == first.pool.stock.free + second.pool.stock.free
    assert [first.found(asked[0]), second.found(asked[1])] == [8, 8]
    first.check()
    second.check()
