"""A replay checks that the machines' tables allow every transition of a trace, and that no transition is missing.

A cursor begins in its machine's initial state. If the cursor's beginning is missing, because the trace continued in a
new file, the cursor begins in the state of its first event. Each later transition must start in the state in which the
last transition ended, and must lead to the state that the table has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from kvpipe.statemachine.core import Compiled, State
from kvpipe.statemachine.node_grant import NODE_GRANT
from kvpipe.statemachine.node_link import NODE_LINK
from kvpipe.trace.events import Dropped, Ended, Event, Started
from kvpipe.trace.transitions import MACHINES, Illegal, NoOp, Transition

PROBLEMS_MAX = 1000
_OF_THE_ENGINE = frozenset({NODE_LINK.name, NODE_GRANT.name})
"""The machines whose cursors last until the engine ends, when no trace is written any more."""
_GRANTED_AGAIN = frozenset({NODE_GRANT.name})
"""The machines whose cursors have a slot's number. Each grant of the slot makes a new cursor with this number."""


class Position(NamedTuple):
    """The identity of a cursor of a trace: process, machine and number."""

    engine: str
    rank: int
    machine: str
    cursor: int

    def __str__(self) -> str:
        """Name the cursor for a report."""
        where = "scheduler" if self.rank < 0 else f"rank {self.rank}"
        return f"{self.machine} {self.cursor} ({where} of {self.engine})"


class Replay:
    """The states of the machines' cursors after the events that were fed so far."""

    def __init__(self) -> None:
        """Start without cursors."""
        self.transitions = self.no_ops = self.cursors = self.dropped = 0
        self.cells: Counter[tuple[str, str, str]] = Counter()  # how often each cell (machine, row, event) was taken
        self.problems: list[str] = []
        self.more_problems = 0
        self._machines: dict[tuple[str, int], Compiled] = {}
        self._at: dict[Position, State] = {}
        self._layers: dict[tuple[str, int], int] = {}
        self._complete: dict[tuple[str, int], bool] = {}  # whether the trace has all transitions of a process
        self._ended: set[tuple[str, int]] = set()

    def feed(self, event: Event) -> None:
        """Check one event. Events of one process must come in the order in which they were written."""
        process = (event.engine, event.rank)
        if isinstance(event, Transition):
            self._move(event, process)
        elif isinstance(event, Started):
            self._layers[process] = event.layers
            if event.part == 0:  # part 0 is of a new process, perhaps of a new engine with the same name
                self._complete[process] = event.detail and event.sample >= 1
                self._at = {at: state for at, state in self._at.items() if (at.engine, at.rank) != process}
                self._ended.discard(process)
        elif isinstance(event, Dropped):
            self.dropped += event.count
            self._complete[process] = False
            self._at = {at: state for at, state in self._at.items() if (at.engine, at.rank) != process}
        elif isinstance(event, Ended):
            self._ended.add(process)

    def finish(self) -> None:
        """End the trace. If a process has ended normally while a job was open, record a problem."""
        for at, state in self._at.items():
            process = (at.engine, at.rank)
            if (
                process in self._ended
                and self._complete.get(process)
                and at.machine in {"save", "load"}
                and not state.final
            ):
                self._problem(f"{at} was left in {state.name}")

    def unfinished(self) -> list[str]:
        """Return the cursors that are not in a final state at the end of the trace, such as requests and jobs."""
        return [
            f"{at} is in {state.name}"
            for at, state in self._at.items()
            if MACHINES[at.machine].finals and not state.final and at.machine not in _OF_THE_ENGINE
        ]

    @property
    def ok(self) -> bool:
        """Whether every transition was legal and no transition was missing."""
        return not self.problems

    def _move(self, event: Transition, process: tuple[str, int]) -> None:
        at = Position(*process, event.machine, event.cursor)
        machine = self._compiled(event, at)
        if machine is None:
            return
        here = self._at.get(at)
        if here is None or (here.final and event.machine in _GRANTED_AGAIN):
            self.cursors += 1
            here = machine.initial
            if here.name != event.was and not self._complete.get(process):
                here = machine.states.get(event.was, here)  # the trace lacks the cursor's beginning
        if here.name != event.was:
            self._problem(f"{at}: {event.on} in {event.was}, but it was in {here.name}: a transition is missing")
            here = machine.states.get(event.was, here)
        edge = here.on.get(event.on)
        if edge is not None:
            self.cells[event.machine, here.row, event.on] += 1
        if edge is None:
            self._problem(f"{at}: {event.on!r} is no event of the machine")
        elif edge.rejects or isinstance(event, Illegal):
            self._problem(f"{at}: {event.on} is illegal in {here.name}: {edge.why}")
        elif edge.to.name != event.now:
            self._problem(f"{at}: {event.on} leads from {here.name} to {edge.to.name}, not to {event.now}")
        elif isinstance(event, NoOp) == edge.moves:
            self._problem(f"{at}: {event.on} in {here.name} is recorded as {'a no-op' if edge.moves else 'a move'}")
        self.transitions += not isinstance(event, NoOp)
        self.no_ops += isinstance(event, NoOp)
        self._at[at] = machine.states.get(event.now, here)

    def _compiled(self, event: Transition, at: Position) -> Compiled | None:
        machine = MACHINES.get(event.machine)
        if machine is None:
            self._problem(f"{at}: there is no such machine")
            return None
        layers = self._layers.get((event.engine, event.rank), 0) if machine.layered else 0
        if machine.layered and not layers:
            self._problem(f"{at}: no line has the number of its engine's layers")
            return None
        compiled = self._machines.get((machine.name, layers))
        if compiled is None:
            compiled = self._machines[machine.name, layers] = machine.compile(layers)
        return compiled

    def _problem(self, text: str) -> None:
        if len(self.problems) < PROBLEMS_MAX:
            self.problems.append(text)
        else:
            self.more_problems += 1


def replay(events: Iterable[Event]) -> Replay:
    """Check all `events` against the machines, and return the result."""
    done = Replay()
    for event in events:
        done.feed(event)
    done.finish()
    return done
