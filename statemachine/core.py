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
the states never change. `cursors.py` has states and cursors. It does not import pydantic, because the holder of a
node's memory has to start quickly.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from kvpipe.statemachine.cursors import Compiled, Cursor, Edge, IllegalTransition, PlainTable, State, Watch

__all__ = [
    "Advance", "Cell", "Compiled", "Cursor", "Edge", "Go", "IllegalTransition", "Machine", "Reject", "State", "Stay",
    "Watch", "advance", "go", "reject", "stay",
]  # fmt: skip

Why = Annotated[str, Field(min_length=4)]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", from_attributes=True)


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

    @classmethod
    def of(cls, table: PlainTable) -> Self:
        """Return the machine of a plain table. Raises pydantic's ValidationError if the table is not total."""
        return cls.model_validate(table)

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
