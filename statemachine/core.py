"""State machines as total tables: every (state, event) pair is a written cell.

Four kinds of cell:

* ``Go(to)``: move to another state.
* ``Advance()``: move to the next layer, ``PENDING -> LAYER_0 -> ... -> LAYER_{n-1}``; the last one moves to the
  machine's ``after_last`` state at once, so ``LAYER_{n-1}`` itself is never rested in.
* ``Stay(why)``: a no-op, with the reason why nothing has to happen.
* ``Reject(why)``: the caller is wrong. The event raises `IllegalTransition` and changes nothing.

A `Machine` is a frozen pydantic model, validated when its module is imported. `Machine.compile` interns one `State`
object per state and layer; a `Cursor` points at one of them. Firing an event is one dict lookup and one store.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
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
    """Move to the next layer, or to the machine's `after_last` when this was the last layer."""

    kind: Literal["advance"] = "advance"


class Stay(_Frozen):
    """Nothing happens, and `why` says so."""

    kind: Literal["stay"] = "stay"
    why: Why


class Reject(_Frozen):
    """The caller is wrong; `why` says how."""

    kind: Literal["reject"] = "reject"
    why: Why


Cell = Annotated[Go | Advance | Stay | Reject, Field(discriminator="kind")]


def go(to: str) -> Go:
    """Shorthand for tables."""
    return Go(to=to)


def stay(why: str) -> Stay:
    """Shorthand for tables."""
    return Stay(why=why)


def reject(why: str) -> Reject:
    """Shorthand for tables."""
    return Reject(why=why)


class IllegalTransition(RuntimeError):  # noqa: N818  (the name of the thing, as in h11's LocalProtocolError)
    """An event that the table rejects. The cursor has not moved.

    Attributes name the `machine`, the cursor's `key`, its `state`, the `event` and the table's reason `why`.
    """

    def __init__(self, machine: str, key: object, state: str, event: str, why: str) -> None:
        """Keep every part as an attribute, so that a trace can carry them as fields."""
        super().__init__(f"{machine} {key!r}: event {event} is illegal in state {state}: {why}")
        self.machine, self.key, self.state, self.event, self.why = machine, key, state, event, why


class Machine(_Frozen):
    """One machine: prose, states, events, and the total table `table[state][event]`.

    `layered` names the state that stands for the family ``LAYER_0 .. LAYER_{n-1}``; `after_last` is where the
    last layer leads; `whole` are the states in which every layer has landed. All are empty without layers.
    """

    name: str
    prose: str
    initial: str
    finals: frozenset[str]
    states: dict[str, str]
    events: dict[str, str]
    table: dict[str, dict[str, Cell]]
    layered: str = ""
    after_last: str = ""
    whole: frozenset[str] = frozenset()

    @model_validator(mode="after")
    def _is_total_closed_and_reachable(self) -> Self:
        def require(ok: bool, problem: str) -> None:  # noqa: FBT001
            if not ok:
                msg = f"machine {self.name!r}: {problem}"
                raise ValueError(msg)

        require(self.initial in self.states, f"initial state {self.initial!r} is not a state")
        require(set(self.table) == set(self.states), "the table's rows are not exactly the states")
        require(self.finals <= set(self.states), "a final state is not a state")
        require(bool(self.layered) == bool(self.after_last), "layered and after_last come together")
        require(self.whole <= set(self.states), "a whole state is not a state")
        require(bool(self.after_last) == (self.after_last in self.whole), "after_last is a whole state")
        edges: dict[str, set[str]] = {}
        for state, row in self.table.items():
            missing, extra = set(self.events) - set(row), set(row) - set(self.events)
            require(not missing and not extra, f"row {state}: missing {sorted(missing)}, unknown {sorted(extra)}")
            edges[state] = set()
            for event, cell in row.items():
                if isinstance(cell, Go):
                    require(cell.to in self.states, f"{state} x {event} leads to unknown state {cell.to!r}")
                    require(cell.to != state, f"{state} x {event}: write Stay(why), not Go to itself")
                    edges[state].add(cell.to)
                elif isinstance(cell, Advance):
                    require(bool(self.layered), f"{state} x {event} advances, but the machine has no layers")
                    require(state in {self.initial, self.layered}, f"{state} x {event} advances from the wrong state")
                    edges[state] |= {self.layered, self.after_last}
                require(state not in self.finals or cell.kind in {"stay", "reject"}, f"final {state} moves on {event}")
        seen, todo = {self.initial}, [self.initial]
        while todo:
            for nxt in edges[todo.pop()] - seen:
                seen.add(nxt)
                todo.append(nxt)
        require(seen == set(self.states), f"unreachable: {sorted(set(self.states) - seen)}")
        return self

    def compile(self, layers: int = 0) -> Compiled:
        """Intern the states for a model of `layers` layers (0 for machines without layers). Cached per pair."""
        if bool(self.layered) != (layers > 0):
            msg = f"machine {self.name!r} {'needs at least one layer' if self.layered else 'has no layers'}"
            raise ValueError(msg)
        return _compile(self.name, layers, _Hashed(self))


class Edge:
    """One compiled cell: where it leads, and how often it was taken (`taken`)."""

    __slots__ = ("event", "moves", "rejects", "taken", "to", "why")

    def __init__(self, event: str, to: State, *, moves: bool, rejects: bool, why: str) -> None:
        """`to` is the state itself when the cell stays or rejects."""
        self.event, self.to, self.moves, self.rejects, self.why, self.taken = event, to, moves, rejects, why, 0


class State:
    """An interned state. `k` is the last landed layer (-1 before the first); `on` maps each event to its edge."""

    __slots__ = ("final", "k", "name", "on", "row")

    def __init__(self, name: str, row: str, k: int, *, final: bool) -> None:
        """`row` is the table row: ``LAYER`` for every ``LAYER_k``."""
        self.name, self.row, self.k, self.final = name, row, k, final
        self.on: dict[str, Edge] = {}

    def __repr__(self) -> str:
        """The state's name, as traces print it."""
        return self.name


class Compiled:
    """A machine with its states interned for a number of layers."""

    def __init__(self, machine: Machine, layers: int) -> None:
        """Build every state, then every edge."""
        self.machine, self.layers = machine, layers
        self.states: dict[str, State] = {}
        for row in machine.states:
            if row == machine.layered:
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

    def _edge(self, state: State, event: str, cell: Go | Advance | Stay | Reject) -> Edge:
        if isinstance(cell, Go):
            return Edge(event, self.states[cell.to], moves=True, rejects=False, why="")
        if isinstance(cell, Advance):
            k = state.k + 1
            last = k >= self.layers - 1
            to = self.states[self.machine.after_last if last else f"{self.machine.layered}_{k}"]
            return Edge(event, to, moves=True, rejects=False, why="")
        return Edge(event, state, moves=False, rejects=isinstance(cell, Reject), why=cell.why)

    def taken(self) -> dict[tuple[str, str], int]:
        """How often each (state, event) edge was taken so far, by every cursor of this machine."""
        return {(s.name, e.event): e.taken for s in self.states.values() for e in s.on.values() if e.taken}


class _Hashed:
    """Carries a machine through `functools.cache`, which hashes only its identity."""

    __slots__ = ("machine",)

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def __hash__(self) -> int:
        return hash(self.machine.name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Hashed) and other.machine is self.machine


@cache
def _compile(_name: str, layers: int, hashed: _Hashed) -> Compiled:
    return Compiled(hashed.machine, layers)


class Cursor:
    """A position in a compiled machine. `key` names what it tracks in errors and traces."""

    __slots__ = ("key", "machine", "state", "watch")

    def __init__(self, machine: Compiled, key: object, watch: Watch | None = None) -> None:
        """Start in the machine's initial state. `watch` hears of every edge that is taken, from then on."""
        self.machine, self.key, self.state, self.watch = machine, key, machine.initial, watch

    def fire(self, event: str, why: str = "") -> Edge:
        """Apply `event` and return the edge taken. `why` it came is for whoever watches.

        Raises:
            IllegalTransition: the table rejects the event here. The cursor has not moved.
            KeyError: `event` is not an event of this machine.

        """
        was = self.state
        edge = was.on[event]
        edge.taken += 1
        self.state = edge.to  # where it is already when the edge stays or rejects
        if self.watch is not None:
            self.watch(self, was, edge, why)
        if edge.rejects:
            raise IllegalTransition(self.machine.machine.name, self.key, was.name, event, edge.why)
        return edge


Watch = Callable[[Cursor, State, Edge, str], object]
"""Hears that a cursor took an edge in a state, and why."""
