"""The machines do, cell by cell, what their tables say. A table that is not total is refused."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import pytest

from kvpipe.cache.chunks import Chunk
from kvpipe.scheduler.in_flight import JobInFlight
from kvpipe.scheduler.reported import Reported
from kvpipe.statemachine import chunk, copy
from kvpipe.statemachine.copy import LOAD, SAVE, LayerCursor
from kvpipe.statemachine.core import (
    Advance,
    Compiled,
    Cursor,
    Edge,
    Go,
    IllegalTransition,
    Machine,
    Reject,
    State,
    Stay,
    advance,
    go,
    reject,
    stay,
)
from kvpipe.statemachine.diagram import MACHINES, to_markdown

ROOT = Path(__file__).resolve().parents[2]
SIZES = [(m, n) for m in MACHINES for n in ((1, 2, 6) if m.layered else (0,))]
CELLS = [(m, n, s, e) for m, n in SIZES for s in m.compile(n).states for e in m.events]


def _row(machine: Machine, state: str) -> str:
    name, _, layer = state.rpartition("_")
    return name if name in machine.layered and layer.isdecimal() else state


def _layer(machine: Machine, state: str) -> int:
    return int(state.rpartition("_")[2]) if _row(machine, state) != state else -1


def _next_layer(machine: Machine, layers: int, state: str, family: str) -> str:
    k = _layer(machine, state) + 1
    return machine.layered[family] if k == layers - 1 else f"{family}_{k}"


@pytest.mark.parametrize(("machine", "layers", "state", "event"), CELLS)
def test_every_cell_does_what_is_in_the_table(machine: Machine, layers: int, state: str, event: str) -> None:
    """Every event in every state moves, stays or raises, as the table says. A rejected event changes nothing."""
    compiled = machine.compile(layers)
    cursor = Cursor(compiled, "key-7")
    cursor.state = compiled.states[state]
    cell = machine.table[_row(machine, state)][event]
    if isinstance(cell, Reject):
        with pytest.raises(IllegalTransition) as caught:
            cursor.fire(event)
        error = caught.value
        assert (error.machine, error.key, error.state, error.event, error.why) == (
            machine.name,
            "key-7",
            state,
            event,
            cell.why,
        )
        assert cursor.state is compiled.states[state]
        return
    edge = cursor.fire(event)
    wanted = state
    if isinstance(cell, Go):
        wanted = f"{cell.to}_{_layer(machine, state)}" if cell.to in machine.layered else cell.to
    elif isinstance(cell, Advance):
        wanted = _next_layer(machine, layers, state, cell.family)
    assert cursor.state is compiled.states[wanted]
    assert edge.moves == (wanted != state)
    assert edge.why == (cell.why if isinstance(cell, Stay) else "")


@pytest.mark.parametrize(("machine", "layers"), SIZES)
def test_every_state_is_reached_by_events_alone(machine: Machine, layers: int) -> None:
    """From the initial state, legal events reach every compiled state of every size."""
    compiled = machine.compile(layers)
    seen, todo = {compiled.initial.name}, [compiled.initial]
    while todo:
        state = todo.pop()
        for event in machine.events:
            cursor = Cursor(compiled, 0)
            cursor.state = state
            if not state.on[event].rejects and cursor.fire(event).moves and cursor.state.name not in seen:
                seen.add(cursor.state.name)
                todo.append(cursor.state)
    assert seen == set(compiled.states)
    assert len(seen) == len(machine.states) + len(machine.layered) * (layers - 2)


@pytest.mark.parametrize("machine", MACHINES, ids=lambda m: m.name)
def test_tables_are_total_and_reasoned(machine: Machine) -> None:
    """Each table has every cell.

    In a final state each event stays or is rejected. Each stay and reject has a reason.
    """
    for state, event in itertools.product(machine.states, machine.events):
        cell = machine.table[state][event]
        if isinstance(cell, (Stay, Reject)):
            assert len(cell.why.strip()) >= 4
        else:
            assert state not in machine.finals


@pytest.mark.parametrize("layers", [1, 2, 6])
def test_a_save_is_final_only_after_its_steps_end(layers: int) -> None:
    """A save whose layers have all landed is LANDED.

    The step's end makes the save FINALIZED. An earlier fault makes it FAILED.
    """
    cursor = LayerCursor(SAVE.compile(layers), 1)
    for k in range(layers):
        assert cursor.landed(k).moves
    assert cursor.state.name == "LANDED"
    cursor.fire(copy.CONFIRM)
    assert cursor.state.name == "FINALIZED"
    other = LayerCursor(SAVE.compile(layers), 2)
    for k in range(layers):
        other.landed(k)
    other.fire(copy.FAULT)
    assert other.state.name == "FAILED"


@pytest.mark.parametrize("machine", [SAVE, LOAD], ids=lambda m: m.name)
@pytest.mark.parametrize(("layers", "first"), [(n, k) for n in (1, 2, 6) for k in range(n + 1)])
def test_landings_and_the_confirmation_may_arrive_in_either_order(machine: Machine, layers: int, first: int) -> None:
    """The last landing and the confirmation may come in either order. `first` layers land before the confirmation."""
    cursor = LayerCursor(machine.compile(layers), 1)
    for k in range(first):
        cursor.landed(k)
    assert not cursor.state.final
    cursor.fire(copy.CONFIRM)
    for k in range(first, layers):
        assert (cursor.state.k, cursor.state.final) == (k - 1, False)
        cursor.landed(k)
    assert cursor.state.name == "FINALIZED"


@pytest.mark.parametrize("machine", [SAVE, LOAD], ids=lambda m: m.name)
@pytest.mark.parametrize("layers", [1, 2, 6])
def test_landed_picks_the_right_column(machine: Machine, layers: int) -> None:
    """In a state of layer k, layer k+1 is "next", earlier layers are "again", and later layers are a "gap"."""
    compiled = machine.compile(layers)
    for state in compiled.states.values():
        k = state.k
        for layer in range(layers + 2):
            cursor = LayerCursor(compiled, 0, watch := Mock())
            cursor.state = state
            wanted = copy.LANDED_NEXT if layer == k + 1 else copy.LANDED_AGAIN if layer <= k else copy.LANDED_GAP
            edge = cursor.state.on[wanted]
            if edge.rejects:
                with pytest.raises(IllegalTransition, match=wanted):
                    cursor.landed(layer)
            else:
                cursor.landed(layer)
            watch.assert_called_once_with(cursor, state, edge, "")


@pytest.mark.parametrize("machine", [SAVE, LOAD], ids=lambda m: m.name)
def test_a_redelivery_after_the_end_changes_nothing(machine: Machine) -> None:
    """A FINALIZED job stays FINALIZED if a layer's landing is reported again."""
    compiled = machine.compile(3)
    for layer in range(3):
        cursor = LayerCursor(compiled, 0)
        cursor.state = compiled.states["FINALIZED"]
        assert not cursor.landed(layer).moves


def test_an_unknown_event_is_a_key_error() -> None:
    """An event that the machine does not have is a KeyError, not a silent no-op."""
    with pytest.raises(KeyError, match="made_up"):
        Cursor(chunk.CHUNK.compile(), 0).fire("made_up")


def test_each_class_of_cursors_has_code_of_its_own() -> None:
    """Each class has its own code object, so that the interpreter's caches in this code belong to only one class."""
    codes = [cls.fire.__code__ for cls in (Cursor, LayerCursor, Chunk, Reported, JobInFlight)]
    assert len({id(code) for code in codes}) == len(codes)
    assert len(set(codes)) == 1


def test_a_watch_is_notified_of_each_edge() -> None:
    """The watch gets the state, the edge and the reason, both for an edge and for a rejected event."""
    compiled, watch = _machine().compile(), Mock()
    cursor = Cursor(compiled, 0, watch)
    cursor.fire("e", "first")
    with pytest.raises(IllegalTransition):
        cursor.fire("e")
    first, last = compiled.states["A"], compiled.states["B"]
    assert watch.mock_calls == [call(cursor, first, first.on["e"], "first"), call(cursor, last, last.on["e"], "")]


@pytest.mark.parametrize("machine", MACHINES, ids=lambda m: m.name)
def test_no_event_changes_the_tables(machine: Machine) -> None:
    """Firing events does not change the compiled machine that cursors share."""
    compiled = machine.compile(3 if machine.layered else 0)
    made = _parts(compiled)
    for state, event in itertools.product(compiled.states.values(), machine.events):
        cursor = Cursor(compiled, 0)
        cursor.state = state
        with contextlib.suppress(IllegalTransition):
            cursor.fire(event)
    assert _parts(compiled) == made


def _parts(compiled: Compiled) -> list[object]:
    """Return all states and edges, and the values of all their slots."""
    states = list(compiled.states.values())
    edges = [edge for state in states for edge in state.on.values()]
    held = [getattr(one, name) for one in states for name in State.__slots__ if name != "on"]
    return [*states, *edges, *held, *(getattr(one, name) for one in edges for name in Edge.__slots__)]


def test_a_move_between_families_keeps_the_layer() -> None:
    """A move from one layered family to another leads to the same layer of the other family."""
    compiled = _twofold().compile(4)
    cursor = Cursor(compiled, 0)
    for event, state in (("e", "L_0"), ("e", "L_1"), ("f", "M_1"), ("e", "M_2"), ("e", "B")):
        assert cursor.fire(event).to is compiled.states[state]
    assert [compiled.states[name].k for name in ("A", "L_1", "M_1", "B")] == [-1, 1, 1, 3]


def test_compile_refuses_the_wrong_kind_of_size() -> None:
    """A layered machine must have a number of layers, and other machines must not."""
    with pytest.raises(ValueError, match="needs at least one layer"):
        SAVE.compile(0)
    with pytest.raises(ValueError, match="has no layers"):
        chunk.CHUNK.compile(3)


def _machine(**changes: Any) -> Machine:
    parts: dict[str, Any] = {
        "name": "m",
        "prose": "a machine",
        "initial": "A",
        "finals": frozenset({"B"}),
        "states": {"A": "first", "B": "last"},
        "events": {"e": "something"},
        "table": {"A": {"e": go("B")}, "B": {"e": reject("it is over")}},
    }
    return Machine(**(parts | changes))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"table": {"A": {}, "B": {"e": stay("over")}}}, r"row A: missing \['e'\]"),
        ({"table": {"A": {"e": go("B"), "f": go("B")}, "B": {"e": stay("over")}}}, r"unknown \['f'\]"),
        ({"table": {"A": {"e": go("B")}}}, "rows are not exactly the states"),
        ({"table": {"A": {"e": go("C")}, "B": {"e": stay("over")}}}, "unknown state 'C'"),
        ({"table": {"A": {"e": stay("waits")}, "B": {"e": stay("over")}}}, r"unreachable: \['B'\]"),
        ({"table": {"A": {"e": go("B")}, "B": {"e": go("A")}}}, "final B moves on e"),
        ({"table": {"A": {"e": go("A")}, "B": {"e": stay("over")}}}, r"write Stay\(why\), not Go to itself"),
        ({"table": {"A": {"e": advance("A")}, "B": {"e": stay("over")}}}, "which is no family"),
        ({"initial": "Z"}, "initial state 'Z' is not a state"),
        ({"finals": frozenset({"Z"})}, "a final state is not a state"),
        ({"layered": {"A": "B"}}, "what follows a family is not whole"),
        ({"layered": {"Z": "B"}, "whole": frozenset({"B"})}, "a family is no state"),
        ({"layered": {"B": "B"}, "whole": frozenset({"B"})}, "a family is no state, whole or final"),
        ({"whole": frozenset({"Z"})}, "a whole state is not a state"),
        ({"table": {"A": {"e": go("B")}, "B": {"e": {"kind": "stay", "why": ""}}}}, "at least 4 characters"),
        ({"surprise": 1}, "Extra inputs are not permitted"),
    ],
)
def test_a_broken_table_is_refused(changes: dict[str, Any], problem: str) -> None:
    """A machine cannot be made if it is not total, closed and reachable, or if a cell has no reason."""
    assert _machine().name == "m"
    with pytest.raises(ValueError, match=problem):
        _machine(**changes)


@pytest.mark.parametrize("of", [_machine(), *(_machine().table["A"].values())], ids=["machine", "cell"])
def test_machine_and_its_cells_cannot_be_changed(of: Any) -> None:
    """A table is validated once, when the machine is made, and cannot be changed afterwards."""
    with pytest.raises(ValueError, match="Instance is frozen"):
        of.name = of.to = "B"


def _twofold(**rows: Any) -> Machine:
    """Return a machine with two families, L and M."""
    table = {
        "A": {"e": advance("L"), "f": stay("too early")},
        "L": {"e": advance("L"), "f": go("M")},
        "M": {"e": advance("M"), "f": stay("too late")},
        "B": dict.fromkeys("ef", reject("it is over")),
    }
    return _machine(
        states=dict.fromkeys("ALMB", "a state"), events={"e": "next", "f": "over"}, table=table | rows,
        layered={"L": "B", "M": "B"}, whole=frozenset({"B"}),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ({"B": {"e": advance("L"), "f": stay("over")}}, "B x e advances from the wrong state"),
        ({"L": {"e": advance("M"), "f": go("M")}}, "L x e advances from the wrong state"),
        ({"A": {"e": advance("L"), "f": go("M")}}, "A x f: no layer for M"),
        ({"A": {"e": advance("N"), "f": stay("over")}}, "A x e advances in 'N', which is no family"),
    ],
)
def test_a_layer_from_nowhere_is_refused(rows: dict[str, Any], problem: str) -> None:
    """An event may advance in a family only from that family, or from a state in which no layer has landed.

    Only a family may move to a family.
    """
    assert _twofold().layered
    with pytest.raises(ValueError, match=problem):
        _twofold(**rows)


@pytest.mark.parametrize("name", ["statemachine", "connectors"])
def test_a_top_level_import_is_refused(name: str) -> None:
    """The folders at the top of the repository cannot be imported under their own names, only as parts of kvpipe."""
    spec = importlib.util.spec_from_file_location(name, ROOT / name / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    with pytest.raises(ImportError, match=f"import this package as 'kvpipe.{name}'"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


@pytest.mark.parametrize("machine", MACHINES, ids=lambda m: m.name)
def test_the_machines_page_is_fresh(machine: Machine) -> None:
    """The page in docs/machines is the page that the table generates now, with one row per cell."""
    page = to_markdown(machine)
    assert (ROOT / "docs" / "machines" / f"{machine.name}.md").read_text(encoding="utf-8") == page
    assert page.count("\n| ") == 1 + len(machine.states) * len(machine.events)
    for name in machine.finals:
        assert f"    {name} --> [*]" in page
