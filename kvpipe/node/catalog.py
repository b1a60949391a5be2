"""The catalog of an engine that keeps its chunks in the slots of a node's memory.

A lookup probes a dict of chunks, as with a private pool. `CatalogFollower` updates the dict from the journal. Saves use
slots from the stock of grants. A lookup pins all chunks of the hit until the step is planned. A lease pins the leased
chunks again until the lease ends. The holder evicts, so the policy of this catalog only records used chunks.

While a chunk grows in its granted slot, lookups do not find the chunk. The holder publishes a *sealed* chunk when all
ranks have landed the chunk. A chunk is sealed when it is full, or when it ends where a request or a prompt ends. A
published chunk does not grow: a request with more units of this chunk saves the longer chunk into another slot.
"""

from __future__ import annotations

import hashlib
import itertools
import secrets
import time
from collections.abc import Iterable, Mapping, MutableMapping
from typing import Final, cast

from kvpipe.cache.catalog import Catalog
from kvpipe.cache.chunks import Chunk, EvictedError, Mark, Owner, Piece
from kvpipe.cache.policy.large import by_key
from kvpipe.cache.tenants import ANYBODY, Tenant
from kvpipe.node.client import NodePool
from kvpipe.node.layout import HEAD, SlotRecord
from kvpipe.node.notes import SlotNotes
from kvpipe.node.replica import SlotPins, split, stamp_of
from kvpipe.node.shared import CatalogFollower, NodeUses, SharedChunk
from kvpipe.statemachine import chunk as m
from kvpipe.statemachine import node_grant as grant_m
from kvpipe.statemachine import node_link as link_m
from kvpipe.trace.log import Counters
from kvpipe.trace.miss_reasons import EVICTED, RESET

NAME_S_MAX: Final = 0.5
"""The longest wait for a new namespace, in seconds: once at start-up, and once after each change of weights."""
_NAME_LOOK_S: Final = 0.001


class NodeCatalog(Catalog):
    """The catalog of one engine on a node's memory."""

    def __init__(self, pool: NodePool, groups: int, counters: Counters, units_per_chunk: int) -> None:
        """Create the catalog over an attached `pool`. Before a call of `name_space`, no chunk is found or saved."""
        assert pool.segment is not None  # noqa: S101  (attached)
        assert pool.leases is not None  # noqa: S101
        self.pool, self._stock, self._pins = pool, pool.stock, pool.leases
        self._segment, self._groups, self._full = pool.segment, groups, units_per_chunk
        self.notes = SlotNotes(pool.segment, pool.note_bytes)
        super().__init__(pool.segment.layout.slots, groups, NodeUses(pool.stock), counters)
        self._stamps: tuple[MutableMapping[bytes, bytes], ...] = tuple(by_key(self.slots) for _ in range(groups))
        """For each cache group, the stamps of the indexed chunks by key. A lookup reads nothing else of a chunk."""
        self._follower: CatalogFollower | None = None
        self._open: dict[int, SharedChunk] = {}  # by slot: chunks with landed units that are not reported yet
        self._landed: dict[int, SharedChunk] = {}  # by slot: reported chunks without the holder's answer
        self._asked: list[tuple[SlotPins, bytes]] = []  # the pins and stamps of this step's lookups
        self._pinned: dict[Owner, list[SlotPins]] = {}  # the pins of leases
        self._space, self._renewed, self._digest, self.shared = "", b"", b"", pool

    @property
    def token(self) -> bytes:
        """The token that identifies the memory. Ranks refuse jobs of a plan for another memory."""
        return self._segment.layout.token

    # ---- namespaces ----------------------------------------------------------------------------------------------

    def name_space(self, space: str) -> None:
        """Use the chunks of namespace `space`.

        A namespace identifies everything except tokens that the bytes of a chunk depend on.
        If `space` is "", chunks of other engines are not used. Otherwise this call may take `NAME_S_MAX` seconds.
        """
        self._space = space or secrets.token_hex()
        self._name()
        if not space:
            return  # a new random namespace has no chunks
        until = time.monotonic() + NAME_S_MAX
        while self._follower is None and self.pool.state == link_m.ATTACHED and time.monotonic() < until:
            self.poll()
            if self._follower is None:
                time.sleep(_NAME_LOOK_S)
        if self._follower is not None:
            self._follower.read_all(until)

    def renew(self) -> None:
        """Stop using all chunks saved so far, for a reset of this engine's cache.

        Other engines still use these chunks.
        """
        self._renewed = secrets.token_bytes(16)
        if self._space:
            self._name()

    def _name(self) -> None:
        self._stop_following()
        self._digest = hashlib.sha256(self._space.encode() + b"\0" + self._renewed).digest()
        self.pool.rename(self._digest)

    def _stop_following(self) -> None:
        self.notes.withdraw(self._index)
        self._follower, self._digest = None, b""
        self._index = tuple({} for _ in range(self._groups))
        self._stamps = tuple(by_key(self.slots) for _ in range(self._groups))

    # ---- the journal ---------------------------------------------------------------------------------------------

    def poll(self) -> None:
        """Receive the holder's answer and send the next batch. Called in every step, between lookups."""
        try:
            self.pool.poll()
            self._follow()
        finally:  # otherwise a save could take the slot of a landed chunk that the holder has not published
            if self._landed:
                self._settle()

    def _follow(self) -> None:
        """Read the journal of the namespace that the holder has named."""
        pool, follower = self.pool, self._follower
        if self._digest and pool.named >= 0 and (follower is None or follower.number != pool.named):
            self.notes.withdraw(self._index)
            follower = self._follower = CatalogFollower(
                self._segment, pool.named, self._groups, self.published, self.unpublished, self._stock.evictions
            )
            self._index = cast("tuple[MutableMapping[bytes, Chunk], ...]", follower.indexes)
        if follower is not None:
            follower.poll()
            if follower.is_whole:
                self.notes.announce()

    @property
    def lag(self) -> int:
        """The number of journal records that this engine has not read yet."""
        return 0 if self._follower is None else self._follower.lag

    def _settle(self) -> None:
        """Drop the landed chunks whose reports the holder has answered without publishing the chunks.

        Such a chunk's slot is in the stock again, because another slot has the chunk's key. All other answered chunks
        are kept until the engine has read their journal records. If more than `2 * RECORDS_MAX` records are unread,
        lookups of a dropped chunk's key miss until the other slot's record is read. A request that has fetched the
        dropped chunk computes the chunk's tokens.
        """
        stock, follower = self._stock, self._follower
        for slot in [slot for slot in self._landed if slot not in stock.reports]:
            if slot not in stock.grants:
                chunk = self._landed[slot]
                if chunk.answered_at is None:
                    chunk.answered_at = int(self._segment.words[HEAD])
                if follower is None or not follower.has_read(chunk.answered_at):
                    continue
            self._forget_landed(slot)

    def _forget_landed(self, slot: int) -> None:
        """Forget a landed chunk, if the slot has one. The holder has answered, and does not publish the chunk."""
        if (chunk := self._landed.pop(slot, None)) is not None:
            self._unpend_chunk(chunk)
            self._drop(chunk, EVICTED)

    def published(self, record: SlotRecord) -> SharedChunk:
        """Return the chunk of a record: this engine's own chunk, or a new chunk object."""
        slot, key, chunk = record.slot, record.key, self._landed.get(record.slot)
        if chunk is not None and chunk.group == record.group and chunk.tail == key:
            del self._landed[slot]
            self._unpend_chunk(chunk)
        else:
            chunk = SharedChunk.of(record, self.machine, self.watch, self._era)
        self._chunks[slot] = chunk  # older records of the slot may have put another chunk there
        chunk.publish(record.generation)
        self._stamps[chunk.group][key] = chunk.stamp
        self.lost_keys.forget(record.group, key)
        self.notes.published(chunk)
        return chunk

    def unpublished(self, chunk: SharedChunk) -> None:
        """Forget a chunk that the holder has evicted. Existing leases on the chunk stay."""
        if chunk.state.row == m.READY:
            self.counters["evicted"] += 1
            self.lost_keys.add(chunk.group, chunk.tail, EVICTED)
            self._drop(chunk, EVICTED)

    def _unpend_chunk(self, chunk: SharedChunk) -> None:
        pending = self._pending[chunk.group]
        if pending.get(chunk.tail) is chunk:
            del pending[chunk.tail]

    @property
    def pending_reports(self) -> bool:
        """Whether an idle engine should take steps, because the holder has yet to answer reports of landed chunks."""
        self._report_sealed()
        return bool(self._landed) and self.pool.state == link_m.ATTACHED

    # ---- reading -------------------------------------------------------------------------------------------------

    def find_saved(self, group: int, key: bytes) -> Chunk | None:
        """See `Catalog.find_saved`. The holder may not have published the chunk yet."""
        return self._index[group].get(key) or self._pending[group].get(key)

    def stamps_of(self, index: object) -> Mapping[bytes, bytes] | None:
        """Return the stamps of the chunks in the dict `index` of a cache group.

        Callers must not change the stamps. Returns None if `index` also has chunks of tiers.
        """
        return next((stamps for one, stamps in zip(self._index, self._stamps, strict=True) if one is index), None)

    def hold(self, stamps: bytes) -> bool:
        """Pin the chunks of the joined `stamps` until the step is planned.

        Returns False, and pins no chunk, if the holder has evicted one of the chunks.
        """
        pins = self._pin(stamps)
        if pins is not None:
            self._asked.append((pins, stamps))
        return pins is not None

    def _pin(self, stamps: bytes) -> SlotPins | None:
        pins = self._pins.pin(stamps)
        if pins is None:  # a failure is rare, so the pinned stamps are collected only now
            leased = cast("Iterable[SharedChunk]", itertools.chain.from_iterable(self.leased.values()))
            held = {chunk.stamp for chunk in leased}
            held.update(stamp for _, asked in self._asked for _, stamp in split(asked))
            pins = self._pins.pin(stamps, held)
        return pins

    def forget_evicted(self, chunks: Iterable[Chunk | None]) -> bool:
        """Forget the chunks that the holder has evicted, which no lookup can pin. Returns whether there were any."""
        shared = [chunk for chunk in chunks if isinstance(chunk, SharedChunk) and chunk.is_published]
        gone = [chunk for chunk in shared if not self._pins.is_there(chunk)]
        for chunk in gone:
            self.unpublished(chunk)
        return bool(gone)

    def end_step(self) -> None:
        """Unpin the chunks that this step's lookups have found. Then poll the holder."""
        if self._asked:
            asked, self._asked = self._asked, []
            for pins, _ in asked:
                self._pins.unpin(pins)
        self._report_sealed()
        self.poll()

    def lease(self, owner: Owner, chunks: list[Chunk], *, timed: bool = True) -> None:
        """Lease `chunks` for `owner`, as `Catalog.lease` does, and pin them.

        Raises:
            EvictedError: the holder has evicted one of the chunks. Nothing is leased.
        """
        pins = self._pin(b"".join([chunk.stamp for chunk in cast("list[SharedChunk]", chunks)]))
        if pins is None:
            self.forget_evicted(chunks)
            raise EvictedError("a chunk was evicted from the node's memory")
        self._pinned.setdefault(owner, []).append(pins)
        super().lease(owner, chunks, timed=timed)

    def release(self, owner: Owner, *, hit: bool = True) -> int:
        """End every lease of `owner`, as `Catalog.release` does, and unpin the chunks."""
        count = super().release(owner, hit=hit)
        for pins in self._pinned.pop(owner, ()):
            self._pins.unpin(pins)
        return count

    # ---- writing -------------------------------------------------------------------------------------------------

    def use_more(self, ready: int) -> None:
        """Do nothing, because the holder grants only slots that have memory."""

    def limit(self, slots: int) -> None:
        """Do nothing, because every rank has all slots of the memory."""

    def reserve(self, group: int, tenant: Tenant = ANYBODY) -> Chunk | None:
        """Take a slot of the stock for a new chunk, or return None if the stock is empty.

        If the stock is empty, the oldest growing chunks are sealed, because the holder evicts only published chunks.
        """
        slot = self._stock.next if self._digest else None
        if slot is None:
            if not any(chunk.sealed for chunk in self._open.values()):
                idle = (chunk for chunk in self._open.values() if not chunk.writers)
                for chunk in itertools.islice(idle, self._stock.wanted):
                    chunk.seal()
            self.counters["save_dropped_pool_full"] += 1
            return None
        self._forget_landed(slot)  # before the slot is taken, because a chunk that is dropped frees a taken slot
        before = self._chunks[slot]
        if isinstance(before, SharedChunk) and before.era is self._era:
            self.unpublished(before)  # the holder has evicted this chunk, and the journal is not read that far yet
        self._stock.take()
        chunk = SharedChunk(self.machine, group, slot, self.watch, tenant)
        chunk.stamp, chunk.era = stamp_of(slot, self._stock.grants[slot].generation + 1), self._era
        chunk.fire(m.RESERVE)
        self._chunks[slot] = chunk
        return chunk

    def write(self, chunk: Chunk, stop: int, key: bytes, *, keep: bool, base: int = 0, before: bytes = b"") -> Piece:
        """Claim units of `chunk`, as `Catalog.write` does. Raises ValueError if the chunk is sealed."""
        if not self.grows(chunk):
            raise ValueError(f"slot {chunk.slot}: no units are added to a sealed chunk")
        piece = super().write(chunk, stop, key, keep=keep, base=base, before=before)
        if keep or stop == self._full:
            chunk.seal()
        return piece

    def grows(self, chunk: Chunk) -> bool:
        """See `Catalog.grows`."""
        return isinstance(chunk, SharedChunk) and not chunk.sealed and self.holds(chunk)

    def keep_mark(self, chunk: Chunk, key: bytes) -> None:
        """Seal a chunk that ends with `key`, so that another request finds the whole chunk."""
        if chunk.tail == key:
            chunk.seal()

    def landed(self, piece: Piece, *, over: bool = False) -> bool:
        """Note that every rank has landed `piece`. A sealed chunk is reported, so that the holder publishes it."""
        chunk = piece.chunk
        if chunk.ready != piece.start or chunk.state.row == m.EVICTING or not isinstance(chunk, SharedChunk):
            return super().landed(piece, over=over)
        self._notify(over=over)
        pending = self._pending[chunk.group]
        for mark in chunk.marks:  # a chunk is pending under the key of its longest mark
            if pending.get(mark.key) is chunk:
                del pending[mark.key]
        chunk.ready, chunk.over = piece.stop, over
        chunk.marks, chunk.identity = (Mark(piece.stop, piece.key, keep=True),), piece.key
        self._finish_write(chunk, landed=True)
        self._open[chunk.slot] = chunk
        return self._report(chunk)

    def _report(self, chunk: SharedChunk) -> bool:
        """Report a sealed chunk that has landed. If the chunk's key is too long, drop the chunk and return False."""
        if not chunk.sealed or chunk.writers:
            return True
        (mark,) = chunk.marks
        del self._open[chunk.slot]
        what = chunk.slot, chunk.group, mark.key, mark.units, self._digest
        if not self._stock.landed(*what, behind=chunk.behind, over=chunk.over):
            self._unpend_chunk(chunk)
            self._drop(chunk, EVICTED)
            return False
        self._landed[chunk.slot] = chunk
        return True

    def _report_sealed(self) -> None:
        """Report the chunks to which no request adds units any more."""
        for chunk in [one for one in self._open.values() if one.sealed and not one.writers]:
            self.notes.on_report(chunk)
            self._report(chunk)

    def reset(self) -> int:
        """Forget every chunk, as `Catalog.reset` does. The chunks stay in the memory for other engines."""
        leased = itertools.chain.from_iterable(self.leased.values())
        held = dict.fromkeys((*leased, *self._writing))
        found = self.used - sum(1 for chunk in self._writing if chunk.state.row == m.EVICTING)
        for pending in self._pending:
            pending.clear()
        there = self._index if self.stale or self.on_drop is not None else ()  # an earlier reset is not swept yet
        rest = itertools.chain.from_iterable(index.values() for index in there)
        for chunk in dict.fromkeys((*held, *self._open.values(), *self._landed.values(), *rest)):
            if chunk.state.row != m.EVICTING:
                self._drop(chunk, RESET)
        self._landed.clear()
        self._open.clear()
        if left := sum(map(len, self._index)):
            self._before, self.stale = self._index, left
            self._era = (int.from_bytes(self._era) + 1).to_bytes(8)
            for chunk in held:
                chunk.era = self._era
        self._stop_following()
        return found

    def sweep(self) -> None:
        """See `Catalog.sweep`."""
        for index in self._before:
            for chunk in [*itertools.islice(index.values(), self.sweep_slots)]:
                self._drop(chunk, RESET)

    def _drop(self, chunk: Chunk, why: str, *, taken: bool = False) -> None:
        """See `Catalog._drop`."""
        stamps = self._stamps[chunk.group]
        if chunk.era is self._era and stamps.get(chunk.tail) == cast("SharedChunk", chunk).stamp:
            del stamps[chunk.tail]
        super()._drop(chunk, why, taken=taken)

    def _vacate(self, chunk: Chunk) -> None:
        """Forget the chunk in its slot. If the chunk's save has failed, the slot is free for the next save."""
        if self._chunks[chunk.slot] is chunk:
            self._chunks[chunk.slot] = None
        self.stale -= chunk.era is not self._era
        grant = self._stock.grants.get(chunk.slot)
        if not chunk.is_published and grant is not None and grant.state.name == grant_m.WRITING:
            self._stock.failed(chunk.slot)

    @property
    def used(self) -> int:
        """The number of slots that this engine writes, or whose chunks it can read."""
        unpublished = {chunk.slot for chunk in self._writing}.union(self._open, self._landed)
        return sum(map(len, self._index)) + len(unpublished)

    def close(self) -> None:
        """Detach from the memory. Slots of unfinished saves are not returned, because their copies may still run."""
        self.pool.leave()
