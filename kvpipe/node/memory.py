"""The memory of a holder, with a region for each slot size. This module decides on the share of each region.

All regions use the same bytes, in slots of their own sizes. For each piece of these bytes, `owners.py` records the
region that may use the piece. When a region lacks slots, the region may get pieces of another region whose chunks
were used less recently.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, NamedTuple

from kvpipe.errors import ConfigError
from kvpipe.machine.headroom import tightest
from kvpipe.node.clients import NodeClient, RefusedError, log_client
from kvpipe.node.evictor import evicting
from kvpipe.node.keeper import Keeper
from kvpipe.node.layout import (
    BEAT,
    BOOT,
    OWNED,
    READY,
    REGION_SLOT_BYTES_MIN,
    REGIONS_MAX,
    NodeLayout,
    OtherVersionError,
    Process,
)
from kvpipe.node.lazy import NUMPY
from kvpipe.node.ledger import Ledger
from kvpipe.node.messages import Hello, MemoryStatus, NodeStatus
from kvpipe.node.owners import NOBODY, Owners
from kvpipe.node.rules import NodeRules, rules_of, write_rules
from kvpipe.node.segment import Segment, add_region, allocate, lock, remove_region
from kvpipe.node.slots import NEVER
from kvpipe.node.usage import status_of

if TYPE_CHECKING:
    from kvpipe.node.slots import Ages

PIECE_BYTES: Final = 32 << 20
SHORT_S: Final = 5.0
"""The pause in seconds before the holder asks the machine for memory again."""
REGION_SLOTS_MIN: Final = 8
"""A memory gets another slot size only if the memory has room for at least this number of slots of that size."""
REGION_SLOTS_MAX: Final = 131_072
"""Another slot size with more slots is refused. Tables of this length take 49 MB, and a takeover takes about 2 s."""
WINDOW_SLOTS: Final = 8
"""The number of slots that a region gets at once. Fewer slots would waste more bytes at the edges."""
START_SLOTS: Final = 128
"""When a new engine greets, its region is filled up to this number of slots, or to a quarter of the memory."""
WINDOWS_MAX: Final = 4
"""The largest number of windows of one length that `share` tries for a region. A leased slot makes a try fail."""
SHARE_S, SHARE_S_MAX = 0.05, 1.0
"""The shortest and the longest time, in seconds, between two calls of `share`.

The time doubles after each call that moves no memory, because a call reads the state of every slot.
"""
_log = logging.getLogger("kvpipe.node")


class Allocator:
    """A thread that gives memory to slots, as long as the machine has free memory. Slots [0, `ready`) have memory."""

    def __init__(self, fd: int, layout: NodeLayout, ready: int) -> None:
        """Start the thread. Slots [0, `ready`) have memory already."""
        self._fd, self._layout, self.ready = fd, layout, ready
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._main, name="kvpipe-node-allocate", daemon=True)
        self._thread.start()

    def _main(self) -> None:
        layout = self._layout
        step = max(1, PIECE_BYTES // layout.slot_bytes)
        while self.ready < layout.slots and not self._stopping.is_set():
            stop = min(self.ready + step, layout.slots)
            room = tightest()
            try:
                if room is None or room.spare >= (stop - self.ready) * layout.slot_bytes:
                    huge = allocate(self._fd, layout, self.ready, stop)
                    if not self.ready:
                        _log.info("slots have %s pages", "huge" if huge else "small")
                    self.ready = stop
                    continue
            except OSError as error:
                _log.warning("no memory: %s", error)
            _log.warning("only %d of %d slots have memory (%s)", self.ready, layout.slots, room)
            self._stopping.wait(SHORT_S)

    def stop(self) -> None:
        """Stop the thread, before the memory's descriptor is closed. Waits until the thread has finished its piece."""
        self._stopping.set()
        self._thread.join()


class Region(NamedTuple):
    """The slots of one size: their tables, and the keeper that grants and evicts them."""

    segment: Segment
    keeper: Keeper


class NodeMemory:
    """A memory with this process as its holder. `regions` has the region of each slot size, by the region's number."""

    def __init__(self, fd: int, boot: int) -> None:
        """Become the holder of the memory `fd`, which `close` closes. `boot` is the holder's token.

        Raises:
            RefusedError: the memory is not usable, or has another holder. The caller closes `fd`.
        """
        own = lock(fd)
        if own is None:
            raise RefusedError("another process holds the memory", again=True)
        self.fd, self._lock, self._boot, self.policy = fd, own, boot, rules_of(fd).policy
        self.regions: dict[int, Region] = {}
        self._segments: dict[int, Segment] = {}
        self._last = 0  # the region that `share` has given slots last
        self._tick, self._shared_s, self._pause_s = itertools.count(1), -math.inf, SHARE_S
        try:
            first = Segment(fd, whole=False)
            self.layout = first.layout
            at = self.layout.owners_at
            self._owners = Owners(first.buffer[at : at + self.layout.tables_bytes - at], self.layout)
            self._segments[0] = first
            for number in range(1, REGIONS_MAX):
                with contextlib.suppress(OtherVersionError):
                    self._segments[number] = Segment(fd, region=number, whole=False)
            for number, segment in self._segments.items():
                self._open(number, segment)
        except (OSError, OtherVersionError, ConfigError, ValueError) as error:
            os.close(own)
            raise RefusedError(str(error)) from None
        self._disown()
        self._allocator = Allocator(fd, self.layout, int(first.words[READY]))

    def _open(self, number: int, segment: Segment) -> Region:
        """Restore a region's state."""
        layout = segment.layout
        keeper = Keeper(
            Ledger(segment, self._beat), evicting(self.policy, layout.slots),
            owns=lambda slot: self._owners.owns(layout, slot), tick=lambda: float(next(self._tick)), watch=log_client,
        )  # fmt: skip
        segment.words[BOOT] = self._boot
        made = self.regions[number] = Region(segment, keeper)
        chunks, engines = keeper.usage().published, len(keeper.clients)
        _log.info("holds %d slots of %d bytes: %d chunks, %d engines", layout.slots, layout.slot_bytes, chunks, engines)
        return made

    def use_policy(self, policy: str) -> None:
        """Evict by another policy from now on, in a memory without engines. All chunks stay."""
        write_rules(self.fd, NodeRules(policy))
        self.policy = policy
        for segment, keeper in self.regions.values():
            keeper.use_policy(evicting(policy, segment.layout.slots))

    def _disown(self) -> None:
        """Make `NOBODY` the owner of the pieces of regions that do not exist."""
        self._owners.give(
            [piece for piece in range(self._owners.count) if self._owners[piece] not in self.regions], NOBODY
        )

    def close(self) -> None:
        """Close every descriptor, and end the mappings."""
        self._allocator.stop()
        self.regions.clear()  # the keepers refer to this object
        self._segments.clear()
        os.close(self._lock)
        os.close(self.fd)

    # ---- regions -------------------------------------------------------------------------------------------------

    def region_for(self, hello: Hello) -> Region:
        """Return the region with slots of the size that an engine needs. The region may be new.

        Raises:
            RefusedError: the memory cannot have slots of this size.
        """
        sizes = {region.segment.layout.slot_bytes: region for region in self.regions.values()}
        for size, region in sizes.items():
            if size != hello.slot_bytes and any(one.token == hello.client for one in region.keeper.clients.values()):
                raise RefusedError(
                    f"this process needs slots of {hello.slot_bytes} bytes, another one of its engine needs {size}; "
                    "start all processes with the same configuration"
                )
        found = sizes.get(hello.slot_bytes)
        if found is None and hello.segment:
            raise RefusedError("the node has another memory than the one this engine uses")
        return found or self._add(hello.slot_bytes)

    def greet(self, region: Region, hello: Hello, process: Process) -> NodeClient:
        """Accept a process of an engine. A new engine gets memory for its stock if there are several slot sizes.

        Raises:
            RefusedError: see `Keeper.greet`, or numpy is not imported yet.
        """
        is_new = not any(one.token == hello.client for one in region.keeper.clients.values())
        if starts := is_new and not hello.segment and len(self.regions) > 1:
            NUMPY.require()
        client = region.keeper.greet(hello, process)
        if starts:
            self._start(region)
        return client

    def _add(self, slot_bytes: int) -> Region:
        """Make a region. The new region replaces a region without engines if there are too many regions."""
        layout = self.layout
        if slot_bytes < REGION_SLOT_BYTES_MIN or layout.slots_bytes // slot_bytes < REGION_SLOTS_MIN:
            raise RefusedError(
                f"the node's memory has slots of {layout.slot_bytes} bytes, this engine needs {slot_bytes}; a second "
                f"size has at least {REGION_SLOT_BYTES_MIN} bytes, and room for at least {REGION_SLOTS_MIN} slots, but "
                f"the memory has {layout.slots_bytes} bytes"
            )
        if layout.slots_bytes // slot_bytes > REGION_SLOTS_MAX:
            raise RefusedError(
                f"the node's memory has slots of {layout.slot_bytes} bytes, this engine needs {slot_bytes}; a second "
                f"size has at most {REGION_SLOTS_MAX} slots, so it needs at least "
                f"{layout.slots_bytes // (REGION_SLOTS_MAX + 1) + 1} bytes here; set a larger chunk_tokens"
            )
        NUMPY.require()
        unused = [number for number, region in self.regions.items() if number and not region.keeper.clients]
        number = next(itertools.chain((n for n in range(1, REGIONS_MAX) if n not in self.regions), unused), None)
        if number is None:
            raise RefusedError(
                f"engines use {REGIONS_MAX} slot sizes of the node's memory already, its most; stop one", again=True
            )
        new = layout.with_slots(number, slot_bytes)
        try:
            remove_region(self.fd, new)  # first, so that no holder finds this region's chunks in foreign pieces
            self.regions.pop(number, None)
            self._segments.pop(number, None)
            self._disown()
            add_region(self.fd, new, self._beat)
            self._segments[number] = Segment(self.fd, region=number, whole=False)
            made = self._open(number, self._segments[number])
        except (OSError, ConfigError) as error:
            raise RefusedError(f"slots of {slot_bytes} bytes get no tables: {error}", again=True) from None
        for _, keeper in self.regions.values():
            keeper.short = None  # an earlier lack of slots does not count: a single region had no other to take from
        _log.info("region %d has slots of %d bytes", number, slot_bytes)
        return made

    @property
    def clients(self) -> Iterator[tuple[Keeper, NodeClient]]:
        """All engines, with the keeper of their region."""
        for region in list(self.regions.values()):
            for client in list(region.keeper.clients.values()):
                yield region.keeper, client

    def died(self, process: Process) -> None:
        """Note that a process has exited. The process may belong to two engines."""
        for keeper, client in self.clients:
            keeper.died(client, process)

    def status(self) -> NodeStatus:
        """Return how the memory is used, for operators."""
        memories = (
            MemoryStatus(
                segment.layout.slot_bytes, keeper.usage()._asdict(), dict(keeper.counts),
                status_of(segment, keeper.clients), self.policy,
            )
            for segment, keeper in self.regions.values()
        )  # fmt: skip
        return NodeStatus(os.getpid(), tuple(memories))

    # ---- a step of the holder ------------------------------------------------------------------------------------

    def _beat(self) -> None:
        """Advance the holder's clock in the tables of every region."""
        for segment in self._segments.values():
            segment.words[BEAT] += 1

    def step(self) -> bool:
        """Advance the clock, and free slots without leases. Returns whether the next step should be soon."""
        self._beat()
        self._use_allocated()
        for _, keeper in self.regions.values():
            keeper.drain()
        is_busy = self._allocator.ready < self.layout.slots
        if len(self.regions) > 1 and any(keeper.short is not None for _, keeper in self.regions.values()):
            is_busy = True
            if NUMPY.is_there() and time.monotonic() - self._shared_s > self._pause_s:
                self._pause_s = SHARE_S if self.share() else min(2 * self._pause_s, SHARE_S_MAX)
                self._shared_s = time.monotonic()
        return is_busy or any(keeper.is_draining for _, keeper in self.regions.values())

    def _use_allocated(self) -> None:
        allocated = self._allocator.ready * self.layout.slot_bytes
        for segment, keeper in self.regions.values():
            ready = min(segment.layout.slots, allocated // segment.layout.slot_bytes)
            if ready > segment.words[READY]:
                keeper.use_more(ready)

    # ---- shares --------------------------------------------------------------------------------------------------

    def share(self) -> bool:
        """Give slots to one of the regions that have lacked slots since the last call.

        A region lacked slots if it has evicted a chunk, or had no chunk to evict. The region gets a window of slots if
        the chunks in the window were used less recently, on average, than the region's last victim. The region whose
        last victim was used most recently is the first to try. After a success no second region tries, because the
        second region would take the new slots of the first region while these slots are free. Returns whether a region
        got slots.
        """
        wanting = {number: one.short for number, (_, one) in self.regions.items() if one.short is not None}
        for _, keeper in self.regions.values():
            keeper.short = None
        turns = sorted(wanting, key=lambda number: (-wanting[number], (number - self._last - 1) % REGIONS_MAX))
        for number in turns:
            segment, keeper = self.regions[number]
            self._beat()  # because a turn reads the state of every slot
            ages = self._ages(number)
            if any(
                self._take(number, window)
                for count in (WINDOW_SLOTS, 1)
                for window in self._windows(segment, ages, count, wanting[number], WINDOWS_MAX)
            ):
                self._last = number
                return True
            keeper.counts["not_grown"] += 1
        return False

    def _start(self, region: Region) -> None:
        """Give a region slots for the stock of a new engine, even if the chunks in these slots were used recently."""
        self._use_allocated()
        segment = region.segment
        number, wanted = segment.layout.region, min(START_SLOTS, segment.layout.slots // 4)
        for count in (WINDOW_SLOTS, 1):
            missing = wanted - int(segment.words[OWNED])
            if missing > 0:
                self._beat()
                for window in self._windows(segment, self._ages(number), count, math.inf, -(-missing // count)):
                    if int(segment.words[OWNED]) < wanted:  # an earlier window may have brought more slots than its own
                        self._take(number, window)

    def _ages(self, but: int) -> Ages:
        """Return the last use of each piece: NaN for a piece of region `but`, infinite if a piece cannot be taken."""
        import numpy as np  # noqa: PLC0415  (see `slots.py`)

        owner = self._owners.all()
        ages = np.full(len(owner), math.nan)
        ages[owner == NOBODY] = NEVER
        for number, (segment, keeper) in self.regions.items():
            if number != but:
                pieces = np.flatnonzero(owner == number)
                first, stop = self._owners.slots_of(segment.layout, pieces, pieces + 1)
                ages[pieces] = self._owners.reduced(np.maximum, np.asarray(keeper.used), first, stop, empty=NEVER)
        return ages

    def _windows(self, segment: Segment, ages: Ages, count: int, short: float, most: int) -> list[range]:
        """Return up to `most` windows of `count` slots that were last used before `short`, the least recent first."""
        import numpy as np  # noqa: PLC0415  (see `slots.py`)

        layout = segment.layout
        step = max(count, self._owners.piece_bytes // layout.slot_bytes)  # smaller steps find the same pieces again
        first = np.arange(0, int(segment.words[READY]) - count + 1, step)
        bounds = self._owners.pieces_of(layout, first, first + count)
        foreign = ~np.isnan(ages)
        pieces = self._owners.reduced(np.add, foreign.astype(float), *bounds, empty=0)
        uses = self._owners.reduced(np.add, np.where(foreign, ages, 0), *bounds, empty=0)
        means = np.divide(uses, pieces, out=np.full(len(first), math.inf), where=pieces > 0)
        older = np.flatnonzero(means < short)
        oldest = older[np.argsort(means[older], kind="stable")[:most]]
        return [range(slot, slot + count) for slot in first[oldest].tolist()]

    def _take(self, number: int, window: range) -> bool:
        """Give a window of slots to a region. Returns False if another region has a lease or a grant in the window."""
        owners, (segment, keeper) = self._owners, self.regions[number]
        touched = owners.pieces(segment.layout, window.start, window.stop)
        wanted = [piece for piece in touched if owners[piece] != number]
        losers: dict[int, set[int]] = {}
        for piece in wanted:
            if (owner := owners[piece]) != NOBODY:
                layout = self.regions[owner].segment.layout
                losers.setdefault(owner, set()).update(owners.slots(layout, range(piece, piece + 1)))
        parts = [(self.regions[owner].keeper, slots) for owner, slots in losers.items()]
        if not all(loser.may_give(slots) for loser, slots in parts):
            return False
        if is_given := all(loser.give(slots) for loser, slots in parts):
            owners.give(wanted, number)
            keeper.use(owners.slots(segment.layout, touched))
            keeper.counts["grown"] += 1
        for loser, slots in parts:
            loser.use(sorted(slots))  # usable again only if another loser has kept a slot, so that no piece has moved
        return is_given
