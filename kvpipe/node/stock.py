"""An engine's stock of granted slots, and the reports of chunks for which the holder has not answered yet."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from kvpipe.node.layout import KEY_BYTES_MAX
from kvpipe.node.messages import BATCH_MAX, BatchAnswer, Publish, SlotBatch, SlotGrant, Use
from kvpipe.node.replica import Placed, stamp_of
from kvpipe.node.uses import UseQueue
from kvpipe.statemachine import node_grant as g
from kvpipe.statemachine.core import Compiled, Cursor, Watch


class NodeGrant(Cursor):
    """A granted slot: a cursor of the node_grant machine."""

    __slots__ = ("generation",)

    def __init__(self, machine: Compiled, slot: int, generation: int, watch: Watch | None) -> None:
        """Create a grant. `generation` is the slot's generation when it was granted."""
        super().__init__(machine, slot, watch)
        self.generation = generation


class Stock:
    """The grants of one engine. Up to `wanted` slots are kept for the next saves."""

    def __init__(self, wanted: int, watch: Watch | None = None) -> None:
        """Begin without a slot."""
        self.wanted, self.watch, self._machine = wanted, watch, g.NODE_GRANT.compile()
        self.grants: dict[int, NodeGrant] = {}
        self._free: list[int] = []
        self.reports: dict[int, Publish] = {}
        """The landed chunks for which the holder has not answered yet, by slot, the oldest first."""
        self._sent: tuple[Publish, ...] = ()
        self.evictions: dict[int, int] = {}
        """The generations of the chunks that operators evict, by slot, until the holder has answered."""
        self._evicted: tuple[SlotGrant, ...] = ()
        self.uses = UseQueue()

    @property
    def next(self) -> int | None:
        """The slot that `take` returns next, or None if the stock is empty."""
        return self._free[-1] if self._free else None

    def take(self) -> int | None:
        """Return a slot for a save. If the stock is empty, return None, and the save is dropped."""
        if not self._free:
            return None
        slot = self._free.pop()
        self.grants[slot].fire(g.TAKE)
        return slot

    def landed(
        self, slot: int, group: int, key: bytes, units: int, namespace: bytes = b"", *, behind: bytes = b"",
        over: bool = False,
    ) -> bool:  # fmt: skip
        """Report that every rank has landed its part of a chunk. The arguments are the fields of `Publish`.

        Returns False if the key is too long. Such a chunk stays unpublished, and its slot is free again.
        """
        if len(key) > KEY_BYTES_MAX:
            self.failed(slot)
            return False
        self.grants[slot].fire(g.LANDED)
        self.reports[slot] = Publish(slot, self.grants[slot].generation, group, key, units, namespace, behind, over)
        return True

    def failed(self, slot: int) -> None:
        """Return a slot to the stock, because its save has failed. No copy accesses the slot any more."""
        self.grants[slot].fire(g.FAILED)
        self._free.append(slot)

    def used(self, places: Iterable[Placed]) -> None:
        """Note that a request has loaded chunks. The last chunk of the prefix is first."""
        self.uses.add(Use("loaded", b"".join(stamp_of(place.slot, place.generation) for place in places)))

    def give_back(self) -> SlotBatch | None:
        """Return a batch that returns all free slots to the holder, because the engine ends.

        The result is None if there are no free slots.
        """
        slots, self._free = self._free, []
        returned = tuple((slot, self.grants[slot].generation) for slot in slots)
        for slot in slots:
            self.grants.pop(slot).fire(g.GIVE_BACK)
        return SlotBatch(0, (), returned) if returned else None

    def batch(self, boot: int, namespace: bytes = b"") -> SlotBatch | None:
        """Return the batch of a step, or None if there is nothing to send.

        Reports are part of each batch until `answered` is called. `namespace` is the digest of the engine's namespace
        if the holder does not know it yet. An eviction is not sent before the report of its chunk.
        """
        self._sent = ()
        want = max(0, self.wanted - len(self._free))
        if not (self.reports or self.uses or want or namespace or self.evictions):
            return None
        self._sent = tuple(itertools.islice(self.reports.values(), BATCH_MAX))
        reported = {report.slot for report in self._sent}
        due = (one for one in self.evictions.items() if one[0] in reported or one[0] not in self.reports)
        self._evicted = tuple(itertools.islice(due, BATCH_MAX))
        return SlotBatch(boot, self._sent, (), self.uses.take(), want, namespace, len(self._free), self._evicted)

    def answered(self, answer: BatchAnswer) -> None:
        """Process the holder's answer to the last batch."""
        late = set(answer.late)
        for report in self._sent:
            slot = report.slot
            if self.reports.pop(slot, None) is None:
                continue
            grant = self.grants[slot]
            if slot in late:
                grant.fire(g.LATE)
                self._free.append(slot)
            else:
                grant.fire(g.DONE)
                del self.grants[slot]
        self._sent = ()
        for slot, generation in self._evicted:
            if self.evictions.get(slot) == generation:
                del self.evictions[slot]
        self._evicted = ()
        for slot, generation in answer.granted:
            self.grants[slot] = NodeGrant(self._machine, slot, generation, self.watch)
            self._free.append(slot)

    def resumed(self, held: Iterable[SlotGrant]) -> None:
        """Continue with a holder that knows the grants `held`. Free slots without such a grant are dropped."""
        known = set(held)
        for slot in [slot for slot in self._free if (slot, self.grants[slot].generation) not in known]:
            self._free.remove(slot)
            self.grants.pop(slot).fire(g.GIVE_BACK)
        self._sent = self._evicted = ()

    @property
    def held(self) -> tuple[SlotGrant, ...]:
        """All grants, for the greeting of a new holder."""
        return tuple((slot, grant.generation) for slot, grant in self.grants.items())

    @property
    def free(self) -> int:
        """The number of slots that saves can take."""
        return len(self._free)
