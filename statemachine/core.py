"""State machines are total tables: every pair of a state and an event has a written cell.

There are four kinds of cell:

* ``Go(to)`` moves to another state.
* ``Advance(family)`` moves to the next layer of a layered family, ``PENDING -> LAYER_0 -> ... -> LAYER_{n-2}``. The
  last of n layers leads to the state that follows the family, so ``LAYER_{n-1}`` does not exist.
* ``Stay(why)`` changes nothing. ``why`` is the reason why no change is needed.
* ``Reject(why)`` means that the caller has a bug. The event raises `IllegalTransition` and changes nothing.

A ``Go`` from one layered family to another keeps the layer.

A `Machine` is a frozen pydantic model, which is validated when its module is imported. `Machine.compile` makes one
`State` per state and layer for one owner (a side, a catalog, a tier). The owner's `Cursor`s point at these states, and
the states never change. Firing an event costs one dict lookup and one store. To count or trace the edges that cursors
take, pass a `Watch` to the cursors.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Why = Annotated[str, Field(min_length=4)]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Go(_Frozen):
    """Move to state `to`."""

    kind: Literal["go"] = "go"
    to: str


class Advance(_Frozen):
    """Move to the next layer of `family`. From the last layer, move to the state that follows the family."""

    kind: Literal["advance"] = "advance"
    family: str


class Stay(_Frozen):
    """The event changes nothing. `why` is the reason, in at least 4 characters."""

    kind: Literal["stay"] = "stay"
    why: Why


class Reject(_Frozen):
    """The event is illegal in this state. Firing the event raises `IllegalTransition`. `why` is the reason."""

    kind: Literal["reject"] = "reject"
    why: Why


Cell = Annotated[Go | Advance | Stay | Reject, Field(discriminator="kind")]


def go(to: str) -> Go:
    """Return a `Go` cell. This is a shorthand for tables."""
    return Go(to=to)


def advance(family: str) -> Advance:
    """Return an `Advance` cell. This is a shorthand for tables."""
    return Advance(family=family)


def stay(why: str) -> Stay:
    """Return a `Stay` cell. This is a shorthand for tables."""
    return Stay(why=why)


def reject(why: str) -> Reject:
    """Return a `Reject` cell. This is a shorthand for tables."""
    return Reject(why=why)


class IllegalTransition(RuntimeError):  # noqa: N818  (the name says what has happened)
    """This exception is raised for an event that the table rejects. The cursor stays in its state.

    Its attributes are the name of the `machine`, the cursor's `key` and `state`, the `event` and the table's reason
    `why`.
    """

    def __init__(self, machine: str, key: object, state: str, event: str, why: str) -> None:
        """Keep every part as an attribute, so that a trace can have the parts as fields."""
        super().__init__(f"{machine} {key!r}: event {event} is illegal in state {state}: {why}")
        self.machine, self.key, self.state, self.event, self.why = machine, key, state, event, why


class Machine(_Frozen):
    """One machine: prose, states, events, and the total table `table[state][event]`.

    A state in `layered` stands for a family ``NAME_0 .. NAME_{n-2}``. `layered` maps such a state to the state that
    follows the family's last layer. `whole` has the states in which every layer has landed. A machine without layers
    has empty `layered` and `whole`.
    """

    name: str
    prose: str
    initial: str
    finals: frozenset[str]
    states: dict[str, str]
    events: dict[str, str]
    table: dict[str, dict[str, Cell]]
    layered: dict[str, str] = {}
    whole: frozenset[str] = frozenset()

    @model_validator(mode="after")
    def _is_total_closed_and_reachable(self) -> Self:
        names = set(self.states)
        self._require(self.initial in names, f"initial state {self.initial!r} is not a state")
        self._require(set(self.table) == names, "the table's rows are not exactly the states")
        self._require(self.finals <= names, "a final state is not a state")
        self._require(self.whole <= names, "a whole state is not a state")
        self._require(set(self.layered) <= names - self.whole - self.finals, "a family is no state, whole or final")
        self._require(set(self.layered.values()) <= self.whole, "what follows a family is not whole")
        edges: dict[str, set[str]] = {}
        for state, row in self.table.items():
            missing, extra = set(self.events) - set(row), set(row) - set(self.events)
            self._require(not missing and not extra, f"row {state}: missing {sorted(missing)}, unknown {sorted(extra)}")
            for event, cell in row.items():
                self._check(state, event, cell)
            edges[state] = {to for cell in row.values() for to in self.leads_to(cell)}
        seen, todo = {self.initial}, [self.initial]
        while todo:
            for nxt in edges[todo.pop()] - seen:
                seen.add(nxt)
                todo.append(nxt)
        self._require(seen == names, f"unreachable: {sorted(names - seen)}")
        return self

    def _check(self, state: str, event: str, cell: Cell) -> None:
        at = f"{state} x {event}"
        if isinstance(cell, Go):
            self._require(cell.to in self.states, f"{at} leads to unknown state {cell.to!r}")
            self._require(cell.to != state, f"{at}: write Stay(why), not Go to itself")
            self._require(cell.to not in self.layered or state in self.layered, f"{at}: no layer for {cell.to}")
        elif isinstance(cell, Advance):
            self._require(cell.family in self.layered, f"{at} advances in {cell.family!r}, which is no family")
            alone = state not in self.layered and state not in self.whole
            self._require(alone or state == cell.family, f"{at} advances from the wrong state")
        self._require(state not in self.finals or not self.leads_to(cell), f"final {state} moves on {event}")

    def _require(self, ok: bool, problem: str) -> None:  # noqa: FBT001
        if not ok:
            msg = f"machine {self.name!r}: {problem}"
            raise ValueError(msg)

    def leads_to(self, cell: Cell) -> tuple[str, ...]:
        """Return the rows to which `cell` may move: two for an `Advance`, none for a `Stay` or a `Reject`."""
        if isinstance(cell, Advance):
            return cell.family, self.layered[cell.family]
        return (cell.to,) if isinstance(cell, Go) else ()

    def compile(self, layers: int = 0) -> Compiled:
        """Make the states of one owner, for a model of `layers` layers (0 for machines without layers).

        Raises:
            ValueError: a layered machine has no layers, or another machine has layers.

        """
        if bool(self.layered) != (layers > 0):
            msg = f"machine {self.name!r} {'needs at least one layer' if self.layered else 'has no layers'}"
            raise ValueError(msg)
        return Compiled(self, layers)


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

    def __init__(self, machine: Machine, layers: int) -> None:
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

    def _edge(self, state: State, event: str, cell: Cell) -> Edge:
        families = self.machine.layered
        if isinstance(cell, Go):
            name = f"{cell.to}_{state.k}" if cell.to in families else cell.to
        elif isinstance(cell, Advance):
            k = state.k + 1
            name = families[cell.family] if k >= self.layers - 1 else f"{cell.family}_{k}"
        else:
            return Edge(event, state, moves=False, rejects=isinstance(cell, Reject), why=cell.why)
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
