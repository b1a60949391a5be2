"""This module makes a page from a machine: a table of every cell, and a mermaid state diagram."""

from __future__ import annotations

from collections import defaultdict

from kvpipe.statemachine.breaker import BREAKER
from kvpipe.statemachine.carry import CARRY
from kvpipe.statemachine.chunk import CHUNK
from kvpipe.statemachine.copy import LOAD, SAVE
from kvpipe.statemachine.core import Advance, Cell, Go, Machine
from kvpipe.statemachine.job import JOB
from kvpipe.statemachine.lookup import LOOKUP
from kvpipe.statemachine.node_client import NODE_CLIENT
from kvpipe.statemachine.node_grant import NODE_GRANT
from kvpipe.statemachine.node_link import NODE_LINK
from kvpipe.statemachine.node_slot import NODE_SLOT
from kvpipe.statemachine.request import REQUEST
from kvpipe.statemachine.saving import SAVING
from kvpipe.statemachine.stage import STAGE
from kvpipe.statemachine.step import STEP
from kvpipe.statemachine.ticket import TICKET

MACHINES: tuple[Machine, ...] = (
    STEP, SAVE, LOAD, TICKET, REQUEST, LOOKUP, SAVING, JOB, CHUNK, STAGE, CARRY, BREAKER,
    NODE_LINK, Machine.of(NODE_CLIENT), Machine.of(NODE_SLOT), NODE_GRANT,
)  # fmt: skip


def to_markdown(machine: Machine) -> str:
    """Return the page of `machine`: prose, diagram, states, events and the whole table with the cells' reasons."""
    title = f"# The {machine.name} machine"
    note = "<!-- Generated from the table by `kvpipe diagrams`; a test fails when it is stale. -->"
    out = [title, "", note, "", machine.prose, "", "```mermaid", *_mermaid(machine), "```", "", "## States", ""]
    out += [
        f"- **{name}**{' (final)' if name in machine.finals else ''}: {doc}" for name, doc in machine.states.items()
    ]
    out += ["", "## Events", ""]
    out += [f"- `{name}`: {doc}" for name, doc in machine.events.items()]
    out += ["", "## Every cell", "", "`→` moves, `·` stays, `✗` is a caller's bug: it raises and changes nothing.", ""]
    out += ["| state | event | | |", "|---|---|---|---|"]
    for state, row in machine.table.items():
        out += [f"| {state} | `{event}` | {_mark(cell)} | {_describe(machine, cell)} |" for event, cell in row.items()]
    return "\n".join(out) + "\n"


def _mark(cell: Cell) -> str:
    return {"go": "→", "advance": "→", "stay": "·", "reject": "✗"}[cell.kind]


def _describe(machine: Machine, cell: Cell) -> str:
    if isinstance(cell, Go):
        return cell.to
    if isinstance(cell, Advance):
        return f"next {cell.family}, after the last {machine.layered[cell.family]}"
    return cell.why


def _mermaid(machine: Machine) -> list[str]:
    arrows: dict[tuple[str, str], list[str]] = defaultdict(list)
    for state, row in machine.table.items():
        for event, cell in row.items():
            for to, nth in zip(machine.leads_to(cell), ("", " (last)"), strict=False):
                arrows[state, to].append(event + nth)
    lines = ["stateDiagram-v2", f"    [*] --> {machine.initial}"]
    lines += [f"    {a} --> {b}: {', '.join(events)}" for (a, b), events in arrows.items()]
    lines += [f"    {name} --> [*]" for name in machine.states if name in machine.finals]
    return lines
