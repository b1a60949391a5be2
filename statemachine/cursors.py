"""States and cursors, which a process can use without pydantic, and plain tables for such a process.

The owner of a machine compiles the machine's table into states, and the owner's cursors point at these states. Firing
an event costs one dict lookup and one store. To count or trace the edges that cursors take, pass a `Watch` to the
cursors.

The holder of a node's memory has to start quickly, so its tables are a `PlainTable` each. Every engine validates these
tables as a `Machine` before the engine starts a holder (see `core.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any, NamedTuple, Protocol


class CompilableTable(Protocol):
    """The parts of a table that are compiled. `core.Machine` and `PlainTable` have these parts."""

    @property
    def name(self) -> str:
        """The machine's name."""

    @property
    def initial(self) -> str:
        """The state in which cursors start."""

    @property
    def finals(self) -> frozenset[str]:
        """The final states."""

    @property
    def states(self) -> Mapping[str, str]:
        """The meaning of each state."""

    @property
    def table(self) -> Mapping[str, Mapping[str, Any]]:
        """The cell of each state and event."""

    @property
    def layered(self) -> Mapping[str, str]:
        """The families of layers, as in `core.Machine`."""

    @property
    def whole(self) -> frozenset[str]:
        """The states in which every layer has landed."""


class PlainCell(NamedTuple):
    """A cell of a plain table: `core.Go` with `to`, or `core.Stay` or `core.Reject` with `why`."""

    kind: str
    to: str = ""
    why: str = ""

    @classmethod
    def go(cls, to: str) -> PlainCell:
        """Return a cell that moves to state `to`."""
        return cls("go", to)

    @classmethod
    def stay(cls, why: str) -> PlainCell:
        """Return a cell that changes nothing, for the reason `why`."""
        return cls("stay", why=why)

    @classmethod
    def reject(cls, why: str) -> PlainCell:
        """Return a cell whose event is illegal, for the reason `why`."""
        return cls("reject", why=why)


class PlainTable(NamedTuple):
    """The table of a machine without layers, which was not validated. The fields are those of `core.Machine`."""

    name: str
    prose: str
    initial: str
    finals: frozenset[str]
    states: dict[str, str]
    events: dict[str, str]
    table: dict[str, dict[str, PlainCell]]
    layered: Mapping[str, str] = {}
    whole: frozenset[str] = frozenset()

    def compile(self) -> Compiled:
        """Make the states of one owner."""
        return Compiled(self, 0)


class IllegalTransition(RuntimeError):  # noqa: N818  (the name says what has happened)
    """This exception is raised for an event that the table rejects. The cursor stays in its state.

    Its attributes are the name of the `machine`, the cursor's `key` and `state`, the `event` and the table's reason
    `why`.
    """

    def __init__(self, machine: str, key: object, state: str, event: str, why: str) -> None:
        """Keep every part as an attribute, so that a trace can have the parts as fields."""
        super().__init__(f"{machine} {key!r}: event {event} is illegal in state {state}: {why}")
        self.machine, self.key, self.state, self.event, self.why = machine, key, state, event, why


class Edge:
    """One compiled cell: the state to which the cell leads, and whether the cell moves or rejects."""

    __slots__ = ("event", "moves", "rejects", "to", "why")

    def __init__(self, event: str, to: State, *, moves: bool, rejects: bool, why: str) -> None:
        """`to` is the state to which the cell leads.

        If the cell stays or rejects, `to` is the state of the cell itself.
        """
        self.event, self.to, self.moves, self.rejects, self.why = event, to, moves, rejects, why


class State:
    """A compiled state. `k` is the last landed layer (-1 before the first); `on` maps each event to its edge."""

    __slots__ = ("final", "k", "name", "on", "row")

    def __init__(self, name: str, row: str, k: int, *, final: bool) -> None:
        """`row` is the name of the table row, such as ``LAYER`` for every ``LAYER_k``."""
        self.name, self.row, self.k, self.final = name, row, k, final
        self.on: dict[str, Edge] = {}

    def __repr__(self) -> str:
        """Return the state's name, as traces print it."""
        return self.name


class Compiled:
    """The states of a machine for one owner and a number of layers. One thread at a time may fire the cursors."""

    def __init__(self, machine: CompilableTable, layers: int) -> None:
        """Build every state, then every edge."""
        self.machine, self.layers = machine, layers
        self.states: dict[str, State] = {}
        for row in machine.states:
            if row in machine.layered:
                for k in range(layers - 1):
                    self._add(f"{row}_{k}", row, k)
            else:
                self._add(row, row, layers - 1 if row in machine.whole else -1)
        self.initial = self.states[machine.initial]
        for state in self.states.values():
            for event, cell in machine.table[state.row].items():
                state.on[event] = self._edge(state, event, cell)

    def _add(self, name: str, row: str, k: int) -> None:
        self.states[name] = State(name, row, k, final=row in self.machine.finals)

    def _edge(self, state: State, event: str, cell: Any) -> Edge:  # noqa: ANN401  (of either kind of table)
        families = self.machine.layered
        if cell.kind == "go":
            name = f"{cell.to}_{state.k}" if cell.to in families else cell.to
        elif cell.kind == "advance":
            k = state.k + 1
            name = families[cell.family] if k >= self.layers - 1 else f"{cell.family}_{k}"
        else:
            return Edge(event, state, moves=False, rejects=cell.kind == "reject", why=cell.why)
        return Edge(event, self.states[name], moves=True, rejects=False, why="")


class Cursor:
    """A position in a compiled machine. In errors and traces, `key` names the object that the cursor follows."""

    __slots__ = ("key", "machine", "state", "watch")

    def __init_subclass__(cls) -> None:
        """Give each class its own code object for `fire`, in which Python caches the attribute offsets of one class."""
        fire = cls.fire
        code = fire.__code__.replace()
        cls.fire = FunctionType(code, fire.__globals__, fire.__name__, fire.__defaults__)  # type: ignore[method-assign]

    def __init__(self, machine: Compiled, key: object, watch: Watch | None = None) -> None:
        """Start in the machine's initial state. `watch`, if given, is called for every fired event."""
        self.machine, self.key, self.state, self.watch = machine, key, machine.initial, watch

    def fire(self, event: str, why: str = "") -> Edge:
        """Apply `event` and return the edge that the cursor took. `why` is the cause of the event, for `watch`.

        Raises:
            IllegalTransition: the table rejects the event in this state. The cursor has not moved.
            KeyError: `event` is not an event of this machine.

        """
        was = self.state
        edge = was.on[event]
        self.state = edge.to  # the same state if the edge stays or rejects
        if self.watch is not None:
            self.watch(self, was, edge, why)
        if edge.rejects:
            raise IllegalTransition(self.machine.machine.name, self.key, was.name, event, edge.why)
        return edge


Watch = Callable[[Cursor, State, Edge, str], object]
"""A function that is called with (cursor, state before, edge taken, cause), once for every fired event.

The function is called even if the edge stays or rejects.
"""
