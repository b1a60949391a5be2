"""The trace of an engine and the holder's log show the moves of the node's memory."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec
import pytest

from kvpipe.node.client import NodePool
from kvpipe.node.layout import BEAT
from kvpipe.statemachine import node_grant as g
from kvpipe.statemachine import node_link as link
from kvpipe.statemachine.core import Edge
from kvpipe.testing.waiting import eventually
from kvpipe.trace.events import SCHEDULER, Started, tag_of
from kvpipe.trace.recorder import Recorder
from kvpipe.trace.replay import Replay
from kvpipe.trace.timeline import spans
from kvpipe.trace.transitions import HolderLost, HolderReplaced, Transition
from tests.node.test_catalog import Worlds
from tests.node.test_holder import Caller, _hello, _holding
from tests.rigs.node_engine import options


def test_trace_replays_slots_and_shows_takeovers(worlds: Worlds) -> None:
    """When a slot is granted again, the trace has a new cursor.

    The timeline marks when the holder was lost and replaced.
    """
    recorder = Recorder(lifecycle=True, transitions=True, detail=True)
    engine = worlds.start(stock=4, trace=recorder)
    for name in map(str, range(8)):  # more chunks than slots
        engine.run(engine.request(name, 8))
        for _ in range(2):
            engine.step()
    worlds.node.take_over()
    engine.step()
    engine.pool.leave()
    events = recorder.take()
    replayed = Replay()
    for event in (Started(0, SCHEDULER, "", 0, 0), *events):
        replayed.feed(event)
    assert replayed.ok, replayed.problems
    moves = [event for event in events if isinstance(event, Transition) and event.machine == g.NODE_GRANT.name]
    assert {event.now for event in moves} == {g.WRITING, g.SENT, g.SETTLED}
    again = [event.cursor for event in moves if event.now == g.WRITING]
    assert len(again) > len(set(again)), "a slot was granted twice"
    tags = [tag_of(event) for event in events if isinstance(event, Transition) and event.machine == "node_link"]
    assert tags == ["node_attached", "holder_lost", "holder_replaced"]
    assert {"holder lost", "holder replaced"} <= {span.name for span in spans(events).spans}


def test_trace_shows_the_holder_s_answers_under_no_request(worlds: Worlds) -> None:
    """The answers arrive only after the saves of a request were planned, so the trace has them under no request."""
    recorder = Recorder(lifecycle=True, transitions=True, detail=True)
    engine = worlds.start(stock=4, trace=recorder)
    one, two = (engine.request(name, 4) for name in ("one", "two"))
    engine.requests = [one, two]
    for request in (one, two):
        engine.admit(request)
        for job in engine.step(request):
            engine.end(job)
    engine.step()
    moves = [event for event in recorder.take() if isinstance(event, Transition) and event.machine == g.NODE_GRANT.name]
    settled = [event.request for event in moves if event.now == g.SETTLED]
    assert settled
    assert not any(settled)


def test_only_the_connection_is_recorded_without_a_trace(worlds: Worlds) -> None:
    """The log has a warning when the holder is lost, and a line when the next holder has taken over."""
    recorder = Recorder()
    engine = worlds.start(trace=recorder)
    engine.run(engine.request("one", 8))
    worlds.node.take_over()
    engine.step()
    levels = [(type(event), event.level) for event in recorder.take() if event.level > logging.DEBUG]
    assert levels == [(HolderLost, logging.WARNING), (HolderReplaced, logging.INFO)]
    assert engine.pool.stock.watch is None


@pytest.mark.parametrize("silent", [True, False])
def test_lost_holder_has_a_reason(short_path: Path, silent: bool) -> None:
    """The reason is that the holder's clock stands still, or that the connection has ended."""
    whys = list[str]()

    def watch(_: object, __: object, edge: Edge, why: str) -> None:
        if edge.event == link.HOLDER_LOST:
            whys.append(why)

    with _holding(short_path) as holder:
        pool = NodePool(options(short_path), watch)

        def attached() -> bool:
            holder.step()
            pool.poll()
            return pool.state == link.ATTACHED and not pool._asks

        assert eventually(attached)
        if silent:
            assert pool.segment is not None
            pool._beats_missed, pool._beat = 100, int(pool.segment.words[BEAT])
        else:
            holder._drop(next(iter(holder._links.values())))
        pool._looked_s = 0
        pool.poll()
        pool.close()
    wanted = "the holder's clock stands still" if silent else "the connection has ended: ConnectionResetError()"
    assert whys == [wanted]


def test_holder_s_log_has_the_moves_of_engines(short_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each line has the engine's name. A holder's first line has the content of the memory."""
    with caplog.at_level(logging.INFO, "kvpipe.node"), _holding(short_path) as holder:
        caller = Caller(holder, short_path)
        caller.ask(msgspec.structs.replace(_hello(), name="tiny"))
        caller.wire.close()
        holder.step()
    first, *others = [record.getMessage() for record in caplog.records]
    moves = [line for line in others if line.startswith("node_client")]
    assert first == "holds 64 slots of 8192 bytes: 0 chunks, 0 engines"
    assert moves == [
        "node_client row=0 name=tiny on=attach was=DETACHED now=ATTACHED",
        "node_client row=0 name=tiny on=hangup was=ATTACHED now=DETACHED",
    ]
