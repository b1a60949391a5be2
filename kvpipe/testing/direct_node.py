"""A node's memory whose holder runs in the test's process, so that tests choose the order of all events."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable

from kvpipe.cache.policy import make_policy
from kvpipe.node.client import NodePool
from kvpipe.node.keeper import Keeper
from kvpipe.node.layout import VERSION, Process
from kvpipe.node.ledger import Ledger
from kvpipe.node.messages import BatchAnswer, Hello, SlotBatch
from kvpipe.node.replica import NodeLeases
from kvpipe.node.segment import Segment, create
from kvpipe.node.stock import Stock
from kvpipe.statemachine import node_link as m
from kvpipe.statemachine.core import Cursor


class DirectNode:
    """A memory of `slots` slots, with the holder's keeper. `numbers` yields a number for each new engine."""

    def __init__(
        self, slots: int, slot_bytes: int, note_bytes: int = 0, *, policy: str = "lru",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """Make the memory. All slots may be used from the start. Slots end with a note of `note_bytes` bytes.

        `policy` evicts, with the seconds of `clock`.
        """
        self.note_bytes, self.policy, self._clock = note_bytes, policy, clock
        self.slots, self.slot_bytes, self.numbers = slots, slot_bytes, itertools.count(1)
        self.fd = create(slots, slot_bytes, rows=4)
        self.keeper = self._begin()

    def _begin(self) -> Keeper:
        ledger, policy = Ledger(Segment(self.fd, whole=False)), make_policy(self.policy, self.slots)
        keeper = Keeper(ledger, policy, fence=lambda: None, clock=self._clock)
        keeper.use_more(self.slots)
        return keeper

    def take_over(self) -> None:
        """Replace the holder. Engines notice the new holder at their next poll."""
        self.keeper = self._begin()

    def close(self) -> None:
        """Close the memory's descriptor."""
        os.close(self.fd)


class DirectPool(NodePool):
    """An engine on a `DirectNode`. The holder's answer to a batch arrives one poll after the batch.

    While `mute` is True no answer arrives, as if the holder were stopped. While `slow` is True the holder carries out a
    batch at the engine's next poll, as a holder in a separate process often does.
    """

    def __init__(self, node: DirectNode, stock: int = 2) -> None:
        """Attach the engine to `node`. `stock` is the number of slots that the engine keeps in stock."""
        self._node, number = node, next(node.numbers)
        self.process = Process(number, number)
        self.token, self.note_bytes = number.to_bytes(16, "big"), node.note_bytes
        self.stock, self.segment = Stock(stock), Segment(os.dup(node.fd))
        self.link = Cursor(m.NODE_LINK.compile(), "pool")
        self.why, self.named, self._digest, self._naming = "", -1, b"", b""
        self.mute = self.slow = False
        self._keeper, self._answer, self._sent = node.keeper, list[BatchAnswer](), list[SlotBatch]()
        self.takeovers, self._beats_missed, self._looked_s = 0, 0, 0.0
        self._greet()
        self.leases = NodeLeases(self.segment, self.client.row)

    def _greet(self) -> None:
        node, token = self._node, self.layout.token
        hello = Hello(VERSION, "scheduler", self.token, b"\0" * 32, node.slots, node.slot_bytes, token, self.stock.held)
        self.client = node.keeper.greet(hello, self.process)
        self._keeper = node.keeper
        self.policy, self.takes_hints = node.policy, node.keeper.evictor.takes_hints
        self.link.fire(m.WELCOME)
        self.stock.resumed(tuple(self.client.granted.items()))
        self.named, self._naming = -1, b""
        self._answer.clear()
        self._sent.clear()

    def poll(self) -> None:
        """Take the answer to the last batch, and send the next batch."""
        if self.mute:
            return
        if self._keeper is not self._node.keeper:
            self.link.fire(m.HOLDER_LOST)
            self._greet()
            self.takeovers += 1
        if self._sent:
            self._answer.append(self._node.keeper.batch(self.client, self._sent.pop()))
        if self._answer:
            self.link.fire(m.ANSWER)
            answer = self._answer.pop()
            self.stock.answered(answer)
            if self._naming and self._naming == self._digest:
                self.named = answer.namespace
        self._naming = self._digest if self.named < 0 else b""
        if (batch := self.stock.batch(0, self._naming)) is not None:
            self._sent.append(batch)
            if not self.slow:
                self._answer.append(self._node.keeper.batch(self.client, self._sent.pop()))
        self._node.keeper.drain()

    def leave(self) -> None:
        """Give the free slots of the stock back to the holder."""
        if (batch := self.stock.give_back()) is not None:
            self._node.keeper.batch(self.client, batch)

    def die(self) -> None:
        """Notify the holder that the engine's process has exited."""
        self._node.keeper.died(self.client, self.process)
