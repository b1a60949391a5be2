"""State machines as total tables: every (state, event) pair is a written cell.

Four kinds of cell:

* ``Go(to)``: move to another state.
* ``Advance(family)``: move to the next layer of a layered family, ``PENDING -> LAYER_0 -> ... -> LAYER_{n-2}``; the
  last layer leads to the state that follows the family, so ``LAYER_{n-1}`` does not exist.
* ``Stay(why)``: a no-op, with the reason why nothing has to happen.
* ``Reject(why)``: the caller is wrong. The event raises `IllegalTransition` and changes nothing.

A ``Go`` from one layered family to another keeps the layer.

A `Machine` is a frozen pydantic model, validated when its module is imported. `Machine.compile` makes one `State` per
state and layer for one owner (a side, a catalog, a tier): its `Cursor`s point at them, and they never change. Firing an
event is one dict lookup and one store. To count or trace the edges that are taken, pass a `Watch` to the cursors.
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
    """Move to the next layer of `family`, or to the state that follows it when this was the last layer."""

    kind: Literal["advance"] = "advance"
    family: str


class Stay(_Frozen):
    """Nothing happens; `why` is the reason, at least 4 characters."""

    kind: Literal["stay"] = "stay"
    why: Why


class Reject(_Frozen):
    """The event is illegal in this state: firing it raises `IllegalTransition`. `why` is the reason."""

    kind: Literal["reject"] = "reject"
    why: Why


Cell = Annotated[Go | Advance | Stay | Reject, Field(discriminator="kind")]


def go(to: str) -> Go:
    """Shorthand for tables."""
    return Go(to=to)


def advance(family: str) -> Advance:
    """Shorthand for tables."""
    return Advance(family=family)


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

    `layered` maps each state that stands for a family ``NAME_0 .. NAME_{n-2}`` to the state that follows its last
    layer; `whole` are the states in which every layer has landed. Both are empty without layers.
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
        """Return the rows to which `cell` may move: two for an `Advance`, none for what stays or rejects."""
        if isinstance(cell, Advance):
            return cell.family, self.layered[cell.family]
        return (cell.to,) if isinstance(cell, Go) else ()

    def compile(self, layers: int = 0) -> Compiled:
        """Make the states of one owner, for a model of `layers` layers (0 for machines without layers).

        Raises:
            ValueError: a layered machine needs layers, the others have none.

        """
        if bool(self.layered) != (layers > 0):
            msg = f"machine {self.name!r} {'needs at least one layer' if self.layered else 'has no layers'}"
            raise ValueError(msg)
        return Compiled(self, layers)


class Edge:
    """One compiled cell: where it leads."""

    __slots__ = ("event", "moves", "rejects", "to", "why")

    def __init__(self, event: str, to: State, *, moves: bool, rejects: bool, why: str) -> None:
        """`to` is the state itself when the cell stays or rejects."""
        self.event, self.to, self.moves, self.rejects, self.why = event, to, moves, rejects, why


class State:
    """A compiled state. `k` is the last landed layer (-1 before the first); `on` maps each event to its edge."""

    __slots__ = ("final", "k", "name", "on", "row")

    def __init__(self, name: str, row: str, k: int, *, final: bool) -> None:
        """`row` is the table row: ``LAYER`` for every ``LAYER_k``."""
        self.name, self.row, self.k, self.final = name, row, k, final
        self.on: dict[str, Edge] = {}

    def __repr__(self) -> str:
        """The state's name, as traces print it."""
        return self.name


class Compiled:
    """A machine's states for one owner and a number of layers. Only one thread at a time may fire its cursors."""

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
    """A position in a compiled machine. `key` names what it tracks in errors and traces."""

    __slots__ = ("key", "machine", "state", "watch")

    def __init_subclass__(cls) -> None:
        """Give each class code of its own for `fire`: Python keeps there where the attributes of one class lie."""
        fire = cls.fire
        code = fire.__code__.replace()
        cls.fire = FunctionType(code, fire.__globals__, fire.__name__, fire.__defaults__)  # type: ignore[method-assign]

    def __init__(self, machine: Compiled, key: object, watch: Watch | None = None) -> None:
        """Start in the machine's initial state. `watch`, if given, is called for every event that is fired."""
        self.machine, self.key, self.state, self.watch = machine, key, machine.initial, watch

    def fire(self, event: str, why: str = "") -> Edge:
        """Apply `event` and return the edge taken. `why`, the cause of the event, is passed on to `watch`.

        Raises:
            IllegalTransition: the table rejects the event here. The cursor has not moved.
            KeyError: `event` is not an event of this machine.

        """
        was = self.state
        edge = was.on[event]
        self.state = edge.to  # where it is already when the edge stays or rejects
        if self.watch is not None:
            self.watch(self, was, edge, why)
        if edge.rejects:
            raise IllegalTransition(self.machine.machine.name, self.key, was.name, event, edge.why)
        return edge


Watch = Callable[[Cursor, State, Edge, str], object]
"""Called with (cursor, state before, edge taken, cause), once per fired event, also if the edge stays or rejects."""
