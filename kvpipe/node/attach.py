"""Attaches an engine's processes to the memory of their node before the engine serves."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from kvpipe.errors import ConfigError
from kvpipe.node.client import NodePool, NodePoolOptions, RankMemory
from kvpipe.node.layout import READY, TOKEN_BYTES
from kvpipe.node.notes import note_bytes
from kvpipe.node.processes import folder_of_user
from kvpipe.node.segment import Segment
from kvpipe.protocol.geometry import Geometry
from kvpipe.statemachine import node_link as m
from kvpipe.transfer.marks import MARK_BYTES
from kvpipe.transfer.pool import SharedSlots, SlotsFile

LOOK_S: Final = 0.005
STOCK_MIN: Final = 32
STOCK_MAX: Final = 256


class PoolKeys(Protocol):
    """The configuration keys that an attaching process reads."""

    @property
    def pool_dir(self) -> Path | None:
        """The folder of the holder's socket, or None for the user's default folder."""

    @property
    def pool_wait_s_max(self) -> int:
        """The longest wait for the node's memory, in seconds."""

    @property
    def keep_s(self) -> int:
        """How many seconds the holder keeps memory that no engine uses."""

    @property
    def pool_checksums(self) -> bool:
        """Whether ranks write and compare digests of chunks."""


class Attached(NamedTuple):
    """The objects through which a process uses its node's memory.

    The scheduler has `pool`, and a rank has `memory` and `shared`. `parts` is the number of parts of a slot (see
    `NodeEngine`).
    """

    parts: int
    pool: NodePool | None = None
    memory: RankMemory | None = None
    shared: SharedSlots | None = None


class NodeEngine(NamedTuple):
    """One engine, as all its processes describe it to the holder.

    `token` has 16 bytes that only this engine uses. A slot has one part per rank, or one part in all if the bytes of
    all ranks are equal. `parts` is the number of parts. A step saves at most about `step_chunks` chunks. If
    `step_chunks` is 0, the engine takes no slots.
    `name` is the engine's name for operators. `policy` is the eviction policy that the engine requires, or "".
    """

    token: bytes
    parts: int
    step_chunks: int = 1
    name: str = ""
    policy: str = ""


def node_options(settings: PoolKeys, geometry: Geometry, engine: NodeEngine) -> NodePoolOptions:
    """Return the options of an engine.

    Raises:
        ConfigError: `pool_bytes_max` is smaller than one slot.
    """
    slot_bytes = node_slot_bytes(geometry, engine.parts)
    slots = geometry.pool_bytes_max // slot_bytes
    if not slots:
        raise ConfigError(
            f"kvpipe: pool_bytes_max={geometry.pool_bytes_max} is smaller than one chunk of all {engine.parts} ranks "
            f"({slot_bytes} bytes); set it to at least {slot_bytes} (with pool='node' it is for the whole node)"
        )
    stock = max(STOCK_MIN, min(STOCK_MAX, 4 * engine.step_chunks)) if engine.step_chunks else 0
    own = engine.token[:TOKEN_BYTES]  # until ranks report the real namespace, the engine finds and saves nothing
    return NodePoolOptions(
        settings.pool_dir or folder_of_user(), own.ljust(32, b"\0"), slots, slot_bytes, stock=stock,
        wait_s_max=settings.pool_wait_s_max, keep_s=settings.keep_s, token=own, name=engine.name,
        note_bytes=node_note_bytes(geometry, engine.parts), policy=engine.policy,
    )  # fmt: skip


def node_note_bytes(geometry: Geometry, parts: int) -> int:
    """Return the size of the note at the end of a slot with `parts` parts."""
    return node_slot_bytes(geometry, parts) - (geometry.slot_bytes + MARK_BYTES) * parts


def node_slot_bytes(geometry: Geometry, parts: int) -> int:
    """Return the size of a slot: `parts` parts, a mark for each part, and a note."""
    return geometry.slot_bytes * parts + note_bytes(geometry.chunk_tokens + geometry.ahead_tokens, parts * MARK_BYTES)


def attach_scheduler(settings: PoolKeys, geometry: Geometry, engine: NodeEngine) -> NodePool:
    """Return the node's memory for the scheduler's process. Waits at most `pool_wait_s_max` seconds.

    Raises:
        ConfigError: the process cannot attach to the memory.
    """
    try:
        pool = NodePool(node_options(settings, geometry, engine))
    except ConfigError as error:
        raise refused(str(error)) from None
    until = time.monotonic() + settings.pool_wait_s_max + 1
    while pool.state == m.CONNECTING and time.monotonic() < until:
        pool.poll()
        time.sleep(LOOK_S)
    if pool.state != m.ATTACHED:
        why = pool.why or f"no holder answers within {settings.pool_wait_s_max} s"
        pool.close()
        raise refused(why)
    return pool


def attach_rank(
    settings: PoolKeys, geometry: Geometry, engine: NodeEngine, rank: int
) -> tuple[RankMemory, SharedSlots]:
    """Return the node's memory for a rank's process, and the rank's part of the memory's slots.

    Raises:
        ConfigError: the process cannot attach to the memory.
    """
    try:
        memory = RankMemory(node_options(settings, geometry, engine))
    except (ConfigError, OSError) as error:
        raise refused(str(error)) from None
    shared = rank_slots(memory.segment, geometry, engine.parts, rank, digests=settings.pool_checksums)
    return memory, shared._replace(file=SlotsFile(memory.socket, memory.helper, memory.segment.layout.slots_at))


def rank_slots(segment: Segment, geometry: Geometry, parts: int, rank: int, *, digests: bool) -> SharedSlots:
    """Return the part of the segment's slots that a rank saves or loads. A slot has `parts` parts."""
    part = rank % parts
    shared = shared_slots(segment, part * geometry.slot_bytes, saves=part == rank)
    return shared._replace(marks_at=geometry.slot_bytes * parts + part * MARK_BYTES, digests=digests)


def shared_slots(segment: Segment, at: int, *, saves: bool) -> SharedSlots:
    """Return the part of the segment's slots that begins at byte `at` of each slot. The whole segment is mapped."""
    layout, slots, words = segment.layout, segment.slots, segment.words
    assert slots is not None  # noqa: S101
    return SharedSlots(slots, layout.slot_bytes, at, layout.token, saves, lambda: int(words[READY]))


def refused(why: str) -> ConfigError:
    """Return the error of an engine that cannot use the node's memory for the reason `why`."""
    why = why.removeprefix("kvpipe: ")
    return ConfigError(f"kvpipe: pool='node' cannot be used: {why}. Set pool='private' or pool_or_private=true.")
