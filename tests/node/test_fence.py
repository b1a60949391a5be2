"""A holder does not reuse a pinned slot, whatever the order in which processors make stores and loads.

The processors of most machines keep stores in a buffer for a while, so that a later load is done first. Such an order
is too rare to wait for, so this test makes every order. A store of the engine or of the holder becomes visible either
at once or at the next fence.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from kvpipe.cache.policy.lru import Lru
from kvpipe.node.keeper import Keeper
from kvpipe.node.layout import VERSION, Process
from kvpipe.node.ledger import Ledger
from kvpipe.node.messages import Hello, Publish, SlotBatch
from kvpipe.node.replica import NodeLeases
from kvpipe.node.segment import Segment, create
from kvpipe.statemachine import node_slot as m
from tests.rigs.node_replica import Replica, evict_all

SLOTS, SLOT_BYTES = 4, 64
HELLO = Hello(VERSION, "scheduler", b"e" * 16, b"n" * 32, SLOTS, SLOT_BYTES)


class EngineProcessor:
    """The processor of an engine that pins one chunk.

    The processor's stores are in `row` until `show` makes them visible.
    """

    def __init__(self, segment: Segment, client: int, place: Any, *, late: bool) -> None:
        self._memory, self._late = segment.leases_of(client), late
        self._row = memoryview(bytearray(self._memory)).cast("I")
        self._leases = NodeLeases(SimpleNamespace(leases_of=lambda _: self._row, generations=segment.generations), 0)  # type: ignore[arg-type]
        self._memory_generations: Any = self._leases._generations
        self._leases._generations = self  # type: ignore[assignment]
        self._place, self._loads, self._stored = place, threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._pin, daemon=True)
        self.has_pinned = False

    def _pin(self) -> None:
        self.has_pinned = self._leases.pin(self._place.stamp) is not None

    def __getitem__(self, slots: Any) -> Any:
        """Load generations as soon as `load` allows it."""
        self._stored.set()
        self._loads.wait()
        return self._memory_generations[slots]

    def store(self) -> None:
        """Store the lease."""
        self._thread.start()
        self._stored.wait()
        if not self._late:
            self.show()

    def load(self) -> None:
        """Load the generation, and end the pin."""
        self._loads.set()
        self._thread.join()
        if not self._late:
            self.show()

    def unpin(self) -> None:
        """End the lease."""
        self._row[:] = memoryview(bytes(self._row.nbytes)).cast("I")
        self.show()

    def show(self) -> None:
        """Make all stores so far visible."""
        self._memory[:] = self._row


class SteppedLedger(Ledger):
    """The holder's processor. Between its stores and loads it calls `at_step`."""

    late = False
    at_step: Callable[[], object] = staticmethod(lambda: None)

    def _raise(self, slot: int, generation: int) -> None:
        self.at_step()
        self._raised = slot, generation
        if not self.late:
            self.show()
        self.at_step()

    def show(self) -> None:
        """Make all stores so far visible."""
        super()._raise(*self._raised)


class SteppedKeeper(Keeper):
    """A keeper that makes a step before each load of leases."""

    def _is_leased(self, slot: int) -> bool:
        self._ledger.at_step()  # type: ignore[attr-defined]
        return super()._is_leased(slot)


class StoreBuffers:
    """A memory with one chunk, which the holder evicts while an engine pins it."""

    def __init__(self) -> None:
        self.fd = create(SLOTS, SLOT_BYTES, rows=1, ring=1024)
        self._segment = Segment(self.fd)
        self._ledger = SteppedLedger(self._segment)
        self._keeper = SteppedKeeper(self._ledger, Lru(), fence=self._fence)
        self._keeper.use_more(SLOTS)
        self._client = self._keeper.greet(HELLO, Process(1, 1))
        self._replica = Replica(self._segment, self._client.namespace, 1)
        self._calls: dict[int, list[Callable[[], object]]] = {}
        self.steps = 0

    def _publish(self) -> int:
        """Publish the chunk, and return its slot."""
        ((slot, generation),) = self._keeper.batch(self._client, SlotBatch(0, want=1)).granted
        self._keeper.batch(self._client, SlotBatch(0, (Publish(slot, generation, 0, b"k", 1),)))
        self._replica.poll()
        return slot

    def evict(self, store_at: int, load_at: int, *, engine_late: bool, holder_late: bool) -> tuple[bool, str]:
        """Evict the chunk. The arguments are the steps of the holder at which the engine stores its lease and loads.

        Return whether the engine has pinned the chunk, and the state of the chunk's slot.
        """
        slot = self._publish()
        place = self._replica.index(0)[b"k"]
        self._engine = EngineProcessor(self._segment, self._client.row, place, late=engine_late)
        self._calls, self.steps = {store_at: [self._engine.store]}, 0
        self._calls.setdefault(load_at, []).append(self._engine.load)
        self._ledger.at_step, self._ledger.late = self._step, holder_late
        evict_all(self._keeper)
        while self._calls:
            self._step()
        pinned, state = self._engine.has_pinned, self._keeper._slots[slot].state.name
        self._ledger.at_step, self._ledger.late = lambda: None, False
        self._engine.unpin()
        self._keeper.drain()
        return pinned, state

    def _step(self) -> None:
        for call in self._calls.pop(self.steps, ()):
            call()
        self.steps += 1

    def _fence(self) -> None:
        """Stand in for `membarrier`: make all stores of all processors visible."""
        self._step()
        self._engine.show()
        self._ledger.show()
        self._step()


def test_leased_slot_is_not_reused_in_any_order_of_stores_and_loads() -> None:
    """The engine pins the chunk in some orders and not in others.

    The holder never frees a slot that the engine has pinned.
    """
    memory = StoreBuffers()
    memory.evict(0, 0, engine_late=False, holder_late=False)
    outcomes = set()
    for store_at, load_at in itertools.combinations_with_replacement(range(memory.steps + 1), 2):
        for engine_late, holder_late in itertools.product((False, True), repeat=2):
            pinned, state = memory.evict(store_at, load_at, engine_late=engine_late, holder_late=holder_late)
            assert not (pinned and state == m.FREE), (store_at, load_at, engine_late, holder_late)
            outcomes.add((pinned, state))
    os.close(memory.fd)
    assert outcomes == {(True, m.EVICTING), (False, m.EVICTING), (False, m.FREE)}
