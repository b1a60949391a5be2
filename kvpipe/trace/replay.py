"""A trace fed back through the machines: every transition in it is one that the tables allow, and none is missing.

A cursor begins in its machine's initial state, or where the trace finds it if its beginning was cut off (a trace that
went on in a new file). From then on each transition must start where the last one ended, and lead to the state that the
table has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from kvpipe.statemachine.core import Compiled, State
from kvpipe.trace.events import Dropped, Ended, Event, Started
from kvpipe.trace.transitions import MACHINES, Illegal, NoOp, Transition

PROBLEMS_MAX = 1000


class Position(NamedTuple):
    """Identifies a cursor of a trace, by process, machine and number."""

    engine: str
    rank: int
    machine: str
    cursor: int

    def __str__(self) -> str:
        """Name it for a report."""
        where = "scheduler" if self.rank < 0 else f"rank {self.rank}"
        return f"{self.machine} {self.cursor} ({where} of {self.engine})"


class Replay:
    """The machines' cursors as a trace has moved them so far."""

    def __init__(self) -> None:
        """Start without cursors."""
        self.transitions = self.no_ops = self.cursors = self.dropped = 0
        self.cells: Counter[tuple[str, str, str]] = Counter()  # how often each was taken: machine, row, event
        self.problems: list[str] = []
        self.more_problems = 0
        self._machines: dict[tuple[str, int], Compiled] = {}
        self._at: dict[Position, State] = {}
        self._layers: dict[tuple[str, int], int] = {}
        self._complete: dict[tuple[str, int], bool] = {}  # whether all of a process's transitions are in the trace
        self._ended: set[tuple[str, int]] = set()

    def feed(self, event: Event) -> None:
        """Check one event. Events of one process must come in the order in which they were written."""
        process = (event.engine, event.rank)
        if isinstance(event, Transition):
            self._move(event, process)
        elif isinstance(event, Started):
            self._layers[process] = event.layers
            if event.part == 0:  # a new engine, though perhaps of the same name
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
        """End the trace: a job that is still open in a process that ended normally is a problem."""
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
        """Return the requests and jobs that are not over at the end of the trace."""
        return [
            f"{at} is in {state.name}"
            for at, state in self._at.items()
            if MACHINES[at.machine].finals and not state.final
        ]

    @property
    def ok(self) -> bool:
        """Whether every transition was legal, and none was missing."""
        return not self.problems

    def _move(self, event: Transition, process: tuple[str, int]) -> None:
        at = Position(*process, event.machine, event.cursor)
        machine = self._compiled(event, at)
        if machine is None:
            return
        here = self._at.get(at)
        if here is None:
            self.cursors += 1
            here = machine.initial
            if here.name != event.was and not self._complete.get(process):
                here = machine.states.get(event.was, here)  # its beginning is not in this trace
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
