"""Every move of every machine has an event. Each event can be written as a line and read back."""

from __future__ import annotations

import msgspec
import pytest

from kvpipe.statemachine.core import Advance, Cursor, IllegalTransition
from kvpipe.trace import transitions
from kvpipe.trace.reader import decoder
from kvpipe.trace.recorder import Recorder


def test_every_possible_move_has_its_event() -> None:
    """Each state to which a cell of a table leads has an event for this move."""
    for machine in transitions.MACHINES.values():
        for was, cells in machine.table.items():
            for cell in cells.values():
                kinds = [transitions.KINDS[machine.name, was, now] for now in machine.leads_to(cell)]
                assert all(issubclass(kind, transitions.Transition) for kind in kinds)
                if isinstance(cell, Advance):
                    assert kinds[0] is transitions.LayerLanded


@pytest.mark.parametrize("name", transitions.EVENTS)
def test_an_event_is_one_line_that_reads_back(name: str) -> None:
    """An event's line begins with the event's name, so that readers can skip a line without decoding it."""
    kind = transitions.EVENTS[name]
    event = kind(1, 2, "r", 3, 4, 5, "engine")
    line = msgspec.json.encode(event)
    assert line.startswith(f'{{"event":"{name}"'.encode())
    assert b"\n" not in line
    assert decoder().decode(line) == event


@pytest.mark.parametrize("name", transitions.EVENTS)
def test_every_event_has_when_and_of_whom(name: str) -> None:
    """Every line has request, epoch, step, rank and both clocks. A transition also has its machine and both states."""
    message = msgspec.json.decode(msgspec.json.encode(transitions.EVENTS[name](1, 2, "r", 3, 4)))
    assert {"t_ns", "wall_ns", "engine", "request", "epoch", "step", "rank"} <= set(message)
    if issubclass(transitions.EVENTS[name], transitions.Transition):
        assert {"machine", "cursor", "on", "was", "now", "why"} <= set(message)


def test_a_watched_cursor_reports_every_edge() -> None:
    """The watch reports moves, no-ops and illegal events, with the state before and after."""
    machine, recorder = transitions.MACHINES["request"].compile(), Recorder()
    cursor = Cursor(machine, "r", lambda *taken: recorder.took("r", 1, 2, taken[0], 7, *taken[1:]))
    cursor.fire("ask")
    cursor.fire("admit_empty", "for a reason")
    with pytest.raises(IllegalTransition):
        cursor.fire("dispatch")
    reported = [one for one in recorder.take() if isinstance(one, transitions.Transition)]
    assert [(type(t), t.cursor, t.was, t.on, t.now) for t in reported] == [
        (transitions.NoOp, 7, "NEW", "ask", "NEW"),
        (transitions.Running, 7, "NEW", "admit_empty", "RUNNING"),
        (transitions.Illegal, 7, "RUNNING", "dispatch", "RUNNING"),
    ]
    assert reported[0].why == machine.states["NEW"].on["ask"].why
    assert reported[1].why == "for a reason"
