"""The memory of a node as text, for `kvpipe pool status` and `kvpipe top`."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from pathlib import Path
from typing import Final, NamedTuple

from pydantic import ByteSize

from kvpipe.node.health import HolderHealth
from kvpipe.node.messages import ClientStatus, MemoryStatus
from kvpipe.node.processes import age_s, process_of
from kvpipe.statemachine import node_client as c
from kvpipe.trace.log import printable

ALWAYS: Final = ("published", "granted", "free")
"""The uses of slots that are always shown. Any other use is shown only if at least one slot has this use."""
STATES: Final = {c.DETACHED: "not connected", c.ATTACHED: "attached", c.ENDING: "ending"}


class UsedSlots(NamedTuple):
    """The slots of one use: their number, their size, and their share of the memory."""

    use: str
    slots: int
    size: str
    share: float


def bytes_text(size: int) -> str:
    """Return a number of bytes with a unit."""
    return ByteSize(size).human_readable(separator=" ")


def up(*pids: int) -> str:
    """Return the age of the oldest of `pids`, such as `, up 0:12:31`. Return "" if all of them have ended."""
    ages = list[float]()
    for pid in pids:
        with contextlib.suppress(OSError):
            ages.append(age_s(process_of(pid)))
    return f", up {timedelta(seconds=int(max(ages)))}" if ages else ""


def head(folder: Path, health: HolderHealth) -> str:
    """Return one line about the holder of `folder`."""
    if not health.pid:
        return f"{health.why} at {printable(str(folder))}"
    text = f"holder {health.pid}{up(health.pid)}, at {printable(str(folder))}"
    return f"{text}: {health.why}" if health.why else text


def title(memory: MemoryStatus) -> str:
    """Return a text with the size of a memory."""
    slots = memory.slots["slots"]
    size = bytes_text(slots * memory.slot_bytes)
    return f"{size}, {slots:,} slots of {bytes_text(memory.slot_bytes)}, policy {printable(memory.policy)}"


def used(memory: MemoryStatus) -> list[UsedSlots]:
    """Return the `UsedSlots` of each use, in the order of the display."""
    slots, size = memory.slots["slots"], memory.slot_bytes
    uses = [*ALWAYS, *(use for use, count in memory.slots.items() if use not in {"slots", *ALWAYS} and count)]
    counts = ((use, memory.slots[use]) for use in uses)
    return [UsedSlots(use, count, bytes_text(count * size), count / max(1, slots)) for use, count in counts]


def engine_name(engine: ClientStatus) -> str:
    """Return an engine's name, or the number of its row while a new holder does not know the name yet."""
    return printable(engine.name) or f"engine {engine.row}"


def engine_state(engine: ClientStatus) -> str:
    """Return the state, the age and the processes of an engine."""
    state = STATES.get(engine.state, engine.state.lower())
    if not engine.pids:
        return f"{state}, no process"
    named = "process" if len(engine.pids) == 1 else "processes"
    return f"{state}{up(*engine.pids)}, {named} {', '.join(map(str, engine.pids))}"


def engine_slots(engine: ClientStatus, slot_bytes: int) -> str:
    """Return a text with the slots that an engine has."""
    if engine.state == c.ENDING:
        return f"{engine.granted} slots in quarantine until its last process ends, {engine.leased} being read"
    stock, writing = bytes_text(engine.stock * slot_bytes), max(0, engine.granted - engine.stock)
    return (
        f"{engine.stock} slots in stock ({stock}), {writing} being written, {engine.leased} being read, "
        f"{engine.published:,} saved"
    )


def counted(memory: MemoryStatus) -> str:
    """Return a text with the numbers of events since the holder began."""
    names = {"published": "saved", "late": "saved twice", "stale": "too late", "evicted": "evicted"}
    return ", ".join(f"{memory.counts.get(count, 0):,} {name}" for count, name in names.items())


def lines(folder: Path, health: HolderHealth) -> list[str]:
    """Return the whole state of the memory as lines of text."""
    out = [head(folder, health)]
    if health.status is None:
        return [*out, f"  {health.remedy}"]
    if not health.status.memories:
        return [*out, "no memory yet: the first engine makes it"]
    for memory in health.status.memories:
        out.append(f"memory: {title(memory)}")
        out += [f"  {one.use:<10} {one.slots:>7,}  {one.size:>10}  {one.share:>4.0%}" for one in used(memory)]
        out.append(f"  since the holder began: {counted(memory)} chunks")
        for engine in memory.clients:
            out += [
                f"  {engine_name(engine)}: {engine_state(engine)}",
                f"    {engine_slots(engine, memory.slot_bytes)}",
            ]
        if not memory.clients:
            out.append("  no engine")
    return out
