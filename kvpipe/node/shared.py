"""The chunks of a node's memory in an engine's catalog, their journal, and the policy that only records their uses."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, cast

from kvpipe.cache.chunks import Chunk, Mark
from kvpipe.cache.policy.base import Evictable
from kvpipe.cache.policy.hints import Hint
from kvpipe.cache.tenants import ANYBODY, UNKNOWN, Tenant
from kvpipe.node.layout import SlotRecord, link_of
from kvpipe.node.messages import Use, UseKind
from kvpipe.node.replica import Follower, stamp_of
from kvpipe.node.segment import Segment
from kvpipe.node.stock import Stock
from kvpipe.statemachine import chunk as m
from kvpipe.statemachine.core import Compiled, Watch

if TYPE_CHECKING:
    from kvpipe.protocol.engine import Request

UNPUBLISHED: Final = -1


class SharedChunk(Chunk):
    """A chunk in a slot of a node's memory.

    `generation` is the slot's generation when the chunk was published, or `UNPUBLISHED`. `stamp` joins the slot and the
    generation for `NodeLeases.pin` and `Job.stamps`. A chunk that will be published has its stamp already. No units are
    added to a `sealed` chunk. `answered_at` is the journal's position at the time of the answer to the chunk's report.
    Before the answer `answered_at` is None. `saved_for` is the request that has saved the last landed units, and the
    number of units of the request's prefix before the chunk. It is None if the chunk needs no note. `over` says that
    the chunk has landed after the end of its request.
    """

    __slots__ = ("answered_at", "generation", "over", "saved_for", "sealed", "stamp")

    def __init__(
        self, machine: Compiled, group: int, slot: int, watch: Watch | None = None, tenant: Tenant = ANYBODY
    ) -> None:
        """Create a chunk that is not published. The arguments are those of `Chunk`."""
        super().__init__(machine, group, slot, watch, tenant)
        self.sealed = self.over = False
        self.answered_at: int | None = None
        self.saved_for: tuple[Request, int] | None = None
        self.publish(UNPUBLISHED)

    @classmethod
    def of(cls, record: SlotRecord, machine: Compiled, watch: Watch | None, era: bytes) -> SharedChunk:
        """Return the chunk of a record, which another engine may have saved."""
        chunk, key = cls(machine, record.group, record.slot, watch, UNKNOWN), record.key
        chunk.era = era
        chunk.fire(m.RESERVE)
        chunk.fire(m.LANDED_LAST)
        chunk.seal()
        chunk.written = chunk.ready = record.units
        chunk.marks, chunk.tail, chunk.identity = (Mark(record.units, key, keep=True),), key, key
        return chunk

    @property
    def is_published(self) -> bool:
        """Whether the holder has published the chunk."""
        return self.generation != UNPUBLISHED

    @property
    def behind(self) -> bytes:
        """The digest of the previous chunk's key, as in `Publish`."""
        before = bytes(self.before).removesuffix(self.era)
        return before and link_of(before)

    def publish(self, generation: int) -> None:
        """Set the generation that the slot has while it holds the chunk."""
        self.generation, self.stamp = generation, stamp_of(self.slot, generation)

    def seal(self) -> None:
        """Mark the chunk, so that the next step publishes the landed units: the chunk's request adds no more units."""
        self.sealed = True


class CatalogFollower(Follower[SharedChunk]):
    """Follows the journal for a `NodeCatalog`, and creates a `SharedChunk` for each published record."""

    def __init__(
        self, segment: Segment, namespace: int, groups: int, published: Callable[[SlotRecord], SharedChunk],
        unpublished: Callable[[SharedChunk], None], evictions: Mapping[int, int],
    ) -> None:  # fmt: skip
        """Read the slot table and the journal. `published` and `unpublished` are methods of the catalog.

        `evictions` are those of the stock. Their chunks are not found, although the holder has not evicted them yet.
        """
        self.number, self._published, self._unpublished = namespace, published, unpublished
        self._evictions = evictions
        super().__init__(segment, namespace, groups)

    def _made(self, record: SlotRecord) -> SharedChunk:
        return self._published(record)

    def _wanted(self, record: SlotRecord) -> bool:
        return super()._wanted(record) and self._evictions.get(record.slot) != record.generation

    def _gone(self, placed: SharedChunk) -> None:
        self._unpublished(placed)

    def read_all(self, until: float) -> None:
        """Scan the slot table, at most until the time `until`. Later polls scan the rest."""
        while not self.is_whole and time.monotonic() < until:
            self.poll()


class NodeUses:
    """Replaces the eviction policy of an engine: the calls become uses, which the holder passes to its own policy."""

    def __init__(self, stock: Stock) -> None:
        """Report uses with the batches of `stock`."""
        self._stock, self._now_s, self._over = stock, 0.0, False
        self._answer: int | None = None

    def _add(self, kind: UseKind, chunks: Sequence[Evictable], *, answer: int | None = None, in_s: float = 0.0) -> None:
        stamps = b"".join([chunk.stamp for chunk in cast("Sequence[SharedChunk]", chunks)])
        self._stock.uses.add(Use(kind, stamps, answer, in_s))  # the holder reads it after the reports of its chunks

    def request(self, now_s: float, *, over: bool) -> None:
        """See `SessionPolicy.request`. The holder uses its own clock."""
        self._now_s, self._over, self._answer = now_s, over, None

    def answered(self, tokens: int) -> None:
        """See `AnsweredPolicy.answered`."""
        self._answer = tokens

    def hint(self, chunk: Evictable, hint: Hint) -> None:
        """See `HintedPolicy.hint`."""
        self.hint_all((chunk,), hint)

    def hint_all(self, chunks: Sequence[Evictable], hint: Hint) -> None:
        """Take a hint on all chunks of a prompt."""
        self._add(hint.action.value, chunks, in_s=hint.at_s - self._now_s)

    def insert(self, chunk: Evictable, *, hit: bool) -> None:
        """Note that a request has loaded the chunk if `hit`. The holder itself inserts a saved chunk."""
        self.insert_all((chunk,), hit=hit)

    def insert_all(self, chunks: Sequence[Evictable], *, hit: bool) -> None:
        """Note that a request has loaded the chunks if `hit`. Otherwise the holder's policy keeps its order."""
        if hit:
            self._add("loaded", chunks)

    def remove(self, chunk: Evictable) -> None:
        """Do nothing, because the holder reads the leases itself."""

    def remove_all(self, chunks: Sequence[Evictable]) -> None:
        """Note that a request leases the chunks, so that the holder need not search for the leases."""
        self._add("leased", chunks[::-1])

    def refresh(self, chunk: Evictable) -> None:
        """Note a use of the chunk."""
        self.refresh_all((chunk,))

    def refresh_all(self, chunks: Sequence[Evictable]) -> None:
        """Note a use of the chunks. If the request has ended, the holder learns how long its answer was."""
        self._add("ended" if self._over else "touched", chunks, answer=self._answer)

    def victim(self) -> None:
        """Return None, because only the holder evicts."""

    def __len__(self) -> int:
        """Return 0, because this engine may evict no chunk."""
        return 0
