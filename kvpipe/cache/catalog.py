"""The catalog: which chunk is in which slot, and which requests read and write it.

Each engine has one catalog, on the scheduler's thread. A chunk can be found under the keys of its *marks*. A mark
(units, key) means that the first `units` units of the chunk have landed on every rank. `key` is the hash of the token
prefix up to the end of these units. Most chunks have one mark. A lookup probes a few dicts. Each lease belongs to one
admission: a (request, epoch) pair. A leased chunk is never evicted.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence

from kvpipe.cache.ahead import Ahead
from kvpipe.cache.chunks import Chunk, Mark, Owner, Piece
from kvpipe.cache.policy.base import AnsweredPolicy, Policy, RememberingPolicy, SessionPolicy, SizedPolicy
from kvpipe.cache.policy.batches import batches
from kvpipe.cache.policy.guard import RescuedPolicy, takes_hints
from kvpipe.cache.policy.hints import Hint
from kvpipe.cache.policy.large import by_key, untracked
from kvpipe.cache.sharing import SharedMemory
from kvpipe.cache.tenants import ANYBODY, Tenant, Tenants
from kvpipe.statemachine import chunk as m
from kvpipe.statemachine.core import Watch
from kvpipe.trace.log import Counters
from kvpipe.trace.miss_reasons import EVICTED, RESET, TORN, LostKeys

KEPT_MARKS_MAX = 4
SWEEP_SLOTS = 64
"""The number of slots in which one call of `sweep` searches for chunks that a reset has forgotten."""


class Catalog:
    """The catalog of one engine. Only the catalog changes slots, keys and leases."""

    sweep_slots = SWEEP_SLOTS
    shared: SharedMemory | None = None
    """The memory that has the slots, or None if this engine alone uses them."""

    def __init__(
        self, slots: int, groups: int, policy: Policy, counters: Counters, *, ready: int | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:  # fmt: skip
        """Create an empty catalog of `slots` slots for `groups` cache groups.

        `ready` is the number of slots, from the first on, that may be used already. If it is None, all slots may be
        used. `clock` returns seconds that never decrease. The default is `time.monotonic`.
        """
        self.slots, self._policy, self.counters = slots, policy, counters
        self._clock = clock
        self._batches = batches(policy)
        self._request = policy.request if isinstance(policy, SessionPolicy) else None
        self._answered = policy.answered if isinstance(policy, AnsweredPolicy) else None
        self._hint = policy.hint if takes_hints(policy) else None
        self._dropped = policy.dropped if isinstance(policy, RememberingPolicy) else None
        self.machine = m.CHUNK.compile()
        self.watch: Watch | None = None  # the `watch` of each chunk that `reserve` creates
        self.on_drop: Callable[[Chunk], object] | None = None  # called for chunks that cannot be found any more
        self.lost_keys, self.tenants = LostKeys(groups), Tenants()
        self.ready = slots if ready is None else ready
        self._free: list[int] = []  # free slots below `fresh`: a chunk was in each of these slots before
        self.fresh = 0
        """The lowest slot that was never used. No slot with a higher number was used either."""
        self._index: tuple[MutableMapping[bytes, Chunk], ...] = tuple(by_key(slots) for _ in range(groups))
        self._before: tuple[MutableMapping[bytes, Chunk], ...] = tuple(by_key(slots) for _ in range(groups))
        """By group and key, the chunks that the last reset has forgotten and whose slots are not freed yet."""
        self._pending: tuple[dict[bytes, Chunk], ...] = tuple({} for _ in range(groups))
        self._writing: dict[Chunk, None] = {}
        self._era, self._swept = b"", 0
        self.stale = 0
        """The number of slots with chunks that a reset has forgotten. These slots count as free."""
        self._chunks: list[Chunk | None] = [None] * slots  # the chunk of each slot; None: the slot is free
        untracked(self._chunks)
        self._guard = policy if isinstance(policy, RescuedPolicy) else None
        if self._guard is not None:
            self._guard.bind(self._evictable)
        self.ahead = Ahead(counters, self.account_of)
        self.leased: dict[Owner, list[Chunk]] = {}  # changed only in this class
        self.leased_since_s: dict[Owner, float] = {}
        self._second = 0  # the present time in whole seconds, updated by `_notify`
        self._size_policy()

    def use_more(self, ready: int) -> None:
        """Use the first `ready` slots, which are in memory on every rank.

        The number of usable slots never decreases.
        """
        self.ready = max(self.ready, min(ready, self.slots))
        self._size_policy()

    def limit(self, slots: int) -> None:
        """Use only the first `slots` slots, because some rank's pool has no more slots.

        The call must come before any slot beyond this limit is used.
        """
        self.slots = min(self.slots, slots)
        self.ready = min(self.ready, self.slots)
        self.fresh = min(self.fresh, self.ready)
        self._free = [slot for slot in self._free if slot < self.slots]
        self._size_policy()

    def _size_policy(self) -> None:
        if isinstance(self._policy, SizedPolicy):
            self._policy.sized(self.ready)

    # ---- finding -------------------------------------------------------------------------------------------------

    def find(self, group: int, key: bytes) -> Chunk | None:
        """Return the chunk that has a mark with the prefix hash `key`, or None. Only the mark's units may be read."""
        return self._index[group].get(key)

    find_saved = find
    """As `find`. A catalog in which another process publishes chunks also finds chunks that wait for this."""

    def index(self, group: int) -> Mapping[bytes, Chunk]:
        """Return the group's index, for lookups that probe many keys. Callers must not change the index."""
        return self._index[group]

    def reset_index(self, group: int) -> Mapping[bytes, object]:
        """Return the keys that the last reset has forgotten and whose chunks are not yet swept.

        Callers must not change the mapping.
        """
        return self._before[group]

    def holds(self, chunk: Chunk) -> bool:
        """Whether the catalog still holds `chunk`, so that the chunk may be read, and units may be added to it."""
        return chunk.state.row not in {m.ABSENT, m.EVICTING} and chunk.era is self._era

    def grows(self, chunk: Chunk) -> bool:
        """Whether units may be added to `chunk`."""
        return self.holds(chunk)

    def pending(self, group: int) -> dict[bytes, Chunk]:
        """Return, by key, the chunks of `group` that are being written. Callers must not change the dict."""
        return self._pending[group]

    def at(self, slot: int) -> Chunk | None:
        """Return the chunk in a slot, or None if the slot is free."""
        chunk = self._chunks[slot]
        return chunk if chunk is not None and chunk.era is self._era else None

    def chunks(self) -> Iterator[Chunk]:
        """Yield the chunk of each slot that is not free."""
        return (chunk for chunk in self._chunks if chunk is not None and chunk.era is self._era)

    def known(self, group: int, key: bytes) -> bool:
        """Whether `key` can be found or is being written."""
        return key in self._index[group] or key in self._pending[group]

    # ---- reading -------------------------------------------------------------------------------------------------

    def lease(self, owner: Owner, chunks: list[Chunk], *, timed: bool = True) -> None:
        """Add leases of `owner` on `chunks`, which last until `release`.

        `timed` leases count in the metric of lease ages. Raises:
            ValueError: a reset has forgotten one of `chunks`. The chunks before the forgotten chunk are leased.
            IllegalTransition: one of `chunks` cannot be found. The chunks before this chunk are leased.
        """
        owned, now_s = self.leased.setdefault(owner, []), self._notify(over=False)
        if timed:
            self.leased_since_s.setdefault(owner, now_s)
        idle: list[Chunk] = []
        era = self._era
        try:
            for chunk in chunks:
                if chunk.era is not era:
                    self._check_era(chunk)
                chunk.fire(m.LEASE)
                if not (chunk.leases or chunk.writers):
                    idle.append(chunk)
                chunk.leases += 1
                # Append inside the loop, so that `release` ends the earlier leases if a later chunk rejects its lease.
                owned.append(chunk)
        finally:
            self._batches.remove_all(idle)

    def release(self, owner: Owner, *, hit: bool = True) -> int:
        """End every lease of `owner`. Returns the number of these leases.

        The chunk that was leased last is evicted first. `hit` tells the policy that a request has used the chunks.
        """
        chunks, ahead = self.leased.pop(owner, []), self.ahead.chunks if hit else None
        self.leased_since_s.pop(owner, None)
        if chunks:
            self._notify(over=False)
        if ahead:
            self.ahead.used(chunks)
        idle: list[Chunk] = []
        for chunk in reversed(chunks):
            chunk.leases -= 1
            if chunk.leases or chunk.writers:
                continue
            if chunk.fire(m.DRAINED).moves:  # the chunk was evicted during the lease, and this was the last lease
                self._vacate(chunk)
            else:
                chunk.used_s = self._second
                idle.append(chunk)
        self._batches.insert_all(idle, hit=hit)
        return len(chunks)

    def refresh(
        self, chunks: Iterable[Chunk], *, over: bool = True, hit: bool = True, answer: int | None = None
    ) -> None:
        """Count `chunks` as used now.

        `chunks` belong to one request. The last chunk of the prefix is first in `chunks`, and is evicted first. `over`
        says that the request has ended. `hit` says that the request has used the chunks. Without `hit`, the chunks are
        kept for a later request. `answer` is the number of tokens that the request has decoded; None: unknown.
        """
        self._notify(over=over)
        if answer is not None and self._answered is not None:
            self._answered(answer)
        second = self._second
        idle: list[Chunk] = []
        for chunk in chunks:
            if not (chunk.writers or chunk.leases):
                chunk.used_s = second
                idle.append(chunk)
        if hit and self.ahead.chunks:
            self.ahead.used(idle)
        self._batches.refresh_all(idle)

    @property
    def takes_hints(self) -> bool:
        """Whether the policy takes hints. The result is False after LRU has replaced the policy."""
        return self._hint is not None and (self._guard is None or self._guard.takes_hints)

    @property
    def now_s(self) -> float:
        """The present time, in seconds of the catalog's clock."""
        return time.monotonic() if self._clock is None else self._clock()

    def hint(self, chunks: Iterable[Chunk], hint: Hint) -> None:
        """Pass a client's hint on a prompt's chunks to the policy, if the policy takes hints."""
        if self._hint is not None:
            self._notify(over=False)
            for chunk in chunks:
                self._hint(chunk, hint)

    def account_of(self, tenant: Tenant) -> object:
        """Return a hashable object: the account whose slots the tenant's chunks take.

        Without quotas, all tenants share one account.
        """
        del tenant
        return None

    def room_ahead(self, tenant: Tenant) -> int:
        """Return how many more chunks of a tenant may be in memory for announced resumes."""
        return self.ahead.of_account(tenant).room(self.slots)

    # ---- writing -------------------------------------------------------------------------------------------------

    def reserve(self, group: int, tenant: Tenant = ANYBODY) -> Chunk | None:
        """Reserve a slot for a new chunk of `tenant`, and evict a chunk if no slot is free.

        Returns None if every chunk is held.
        """
        if not self._free and self.fresh < self.ready:
            slot, self.fresh = self.fresh, self.fresh + 1
        elif self._free or self._evict_one():
            slot = self._free.pop()  # the slot that was freed last, which may still be in the processor's caches
        else:
            self.counters["save_dropped_pool_full"] += 1
            return None
        chunk = Chunk(self.machine, group, slot, self.watch, tenant)
        chunk.era = self._era
        chunk.fire(m.RESERVE)
        self._chunks[chunk.slot] = chunk
        return chunk

    def write(self, chunk: Chunk, stop: int, key: bytes, *, keep: bool, base: int = 0, before: bytes = b"") -> Piece:
        """Assign units [chunk.written, stop) of `chunk` to one job, which will write them, and return the piece.

        `key` is the prefix hash at `stop`. `before` is the prefix hash at `base`, or b"" if `base` is 0 or if the
        chunk's attribute `before` is already set. `keep` and `base` are explained in `Piece`.

        Raises:
            ValueError: a reset has forgotten the chunk.
            IllegalTransition: the chunk was evicted.
        """
        self._check_era(chunk)
        if chunk.ready or chunk.writers:
            chunk.fire(m.GROW)
        if chunk.ready and not chunk.held:  # the policy does not have a chunk of which no unit has landed
            self._policy.remove(chunk)
        piece = Piece(chunk, chunk.written, stop, key, keep, base)
        chunk.written, chunk.tail = stop, key
        if before:
            chunk.before = before + self._era
        chunk.writers += 1
        self._writing[chunk] = None
        self._pending[chunk.group].setdefault(key, chunk)
        return piece

    def abandon(self, chunk: Chunk) -> None:
        """Free the slot of a reserved chunk into which no unit was written."""
        chunk.fire(m.LOST_LAST)
        self._vacate(chunk)

    def landed(self, piece: Piece, *, over: bool = False) -> bool:
        """Publish a piece that every rank has. `over` says that the request that saved the piece has ended.

        If the chunk was evicted, or if an earlier piece of the chunk was lost, drop the piece and return False.
        """
        chunk = piece.chunk
        self._notify(over=over)
        self._unpend(piece)
        whole = chunk.ready == piece.start and chunk.state.row != m.EVICTING
        if not whole:
            self._finish_write(chunk, landed=False)
            return False
        chunk.ready = piece.stop
        self._mark(chunk, Mark(piece.stop, piece.key, keep=piece.keep or piece.key == chunk.keeps))
        self._finish_write(chunk, landed=True)
        return True

    def lost(self, piece: Piece) -> None:
        """Drop a piece that a rank has failed, and all later pieces of the same chunk. Earlier pieces stay."""
        self._notify(over=False)
        self._unpend(piece)
        self.lost_keys.add(piece.chunk.group, piece.key, TORN)
        self._finish_write(piece.chunk, landed=False)

    def keep_mark(self, chunk: Chunk, key: bytes) -> None:
        """Keep the mark `key` when the chunk grows, because another request has used it.

        The mark may not have landed yet.
        """
        chunk.keeps = key
        chunk.marks = tuple(Mark(mark.units, key, keep=True) if mark.key == key else mark for mark in chunk.marks)

    def evict(self, chunk: Chunk, *, taken: bool = False) -> bool:
        """Evict one chunk, even while the chunk is read or written.

        Returns False if the catalog does not hold the chunk any more. The chunk's slot becomes free after the last read
        and write have ended. `taken` says that `Policy.victim` has already removed the chunk from the policy.
        """
        if not self.holds(chunk):
            return False
        self.counters["evicted"] += 1
        self._drop(chunk, EVICTED, taken=taken)
        return True

    def reset(self) -> int:
        """Forget every chunk. Returns the number of forgotten chunks.

        No chunk can be found from now on. The slots of held chunks become free when these chunks are released. The
        slots of other chunks count as free at once, and `sweep` drops these chunks later. Therefore the call's time is
        proportional to the number of held chunks. If an earlier reset is not swept yet, the call also takes time for
        each chunk that was saved since that reset.
        """
        held = dict.fromkeys((*itertools.chain.from_iterable(self.leased.values()), *self._writing))
        found = self.used - sum(1 for chunk in held if chunk.state.row == m.EVICTING)
        for chunk in held:
            if chunk.state.row != m.EVICTING:
                self._drop(chunk, RESET)
        there = self._index if self.stale or self.on_drop is not None else ()
        for chunk in dict.fromkeys(itertools.chain.from_iterable(index.values() for index in there)):
            self._drop(chunk, RESET)
        self._begin_era([*held])
        self.sweep()
        return found

    def _begin_era(self, held: Sequence[Chunk]) -> None:
        """Forget all chunks, so that no chunk can be found.

        The chunks in `held` keep their slots until they are released.
        """
        rest = self.used - len(held)
        if rest:
            self._index, self._before, self.stale, self._swept = self._before, self._index, rest, 0
            self._era = (int.from_bytes(self._era) + 1).to_bytes(8)
            for chunk in held:
                chunk.era = self._era

    def sweep(self) -> None:
        """Free those of the next `sweep_slots` slots whose chunks the last reset has forgotten."""
        for _ in range(min(self.sweep_slots, self.fresh - self._swept) if self.stale else 0):
            chunk = self._chunks[self._swept]
            self._swept += 1
            if chunk is not None and chunk.era is not self._era:
                self._drop(chunk, RESET)

    # ---- internal ------------------------------------------------------------------------------------------------

    def _check_era(self, chunk: Chunk) -> None:
        if chunk.era is not self._era:
            raise ValueError(f"slot {chunk.slot}: a reset has forgotten the chunk in this slot")

    def _mark(self, chunk: Chunk, mark: Mark) -> None:
        index = self._index[chunk.group]
        holder = index.get(mark.key)
        if holder is not None and holder is not chunk:
            return  # another chunk with the same prefix was published first; this chunk keeps its old marks
        kept: Sequence[Mark] = ()
        if chunk.marks:  # the chunk has grown
            kept = [old for old in chunk.marks if old.keep and old.units < mark.units][-(KEPT_MARKS_MAX - 1) :]
            for old in chunk.marks:
                if old not in kept and index.get(old.key) is chunk:
                    del index[old.key]
        chunk.marks = (*kept, mark)  # a tuple of untracked objects, which the garbage collector stops tracking
        chunk.identity = mark.key + chunk.era
        index[mark.key] = chunk
        self.lost_keys.forget(chunk.group, mark.key)

    def _unpend(self, piece: Piece) -> None:
        pending = self._pending[piece.chunk.group]
        if pending.get(piece.key) is piece.chunk:
            del pending[piece.key]

    def _finish_write(self, chunk: Chunk, *, landed: bool) -> None:
        chunk.writers -= 1
        more = chunk.writers > 0
        if not more:
            del self._writing[chunk]
        if landed:
            chunk.fire(m.LANDED_MORE if more else m.LANDED_LAST)
        elif chunk.fire(m.LOST_MORE if more else m.LOST_LAST).to.row == m.ABSENT:
            self._vacate(chunk)
            return
        if more:
            return
        if chunk.state.row == m.EVICTING:
            if not chunk.leases:
                chunk.fire(m.DRAINED)
                self._vacate(chunk)
            return
        if chunk.written != chunk.ready:
            chunk.tail = next((mark.key for mark in chunk.marks if mark.units == chunk.ready), b"")
        chunk.written = chunk.ready  # earlier, jobs may have still been writing units behind a lost piece
        if not chunk.marks:  # while this chunk was written, the same content was published from another slot
            self._drop(chunk, EVICTED)
        elif not chunk.leases:
            chunk.used_s = self._second
            self._policy.insert(chunk, hit=False)

    def _notify(self, *, over: bool) -> float:
        """Read the clock and return the time.

        If the policy is a `SessionPolicy`, pass the time and `over` (whether the request has ended) to the policy.
        """
        # the same as the property `now_s`, but faster
        now_s = time.monotonic() if self._clock is None else self._clock()
        if now_s - self._second >= 1.0:
            self._second = int(now_s)  # one int object for all chunks that are used in this second
        if self._request is not None:
            self._request(now_s, over=over)
        return now_s

    def _evictable(self) -> list[Chunk]:
        """Return all chunks that may be evicted, the least recently used first. This reads every slot."""
        idle = (one for one in self._chunks if one is not None and one.state.row == m.READY and not one.held)
        return sorted(idle, key=lambda chunk: chunk.used_s)

    def _evict_one(self) -> bool:
        if self.stale:
            while not self._free and self.stale and self._swept < self.fresh:
                self.sweep()
            if self._free:
                return True
        return self._evict_victim()

    def _evict_victim(self) -> bool:
        """Evict the next victim and free its slot. Returns False if no chunk may be evicted."""
        chunk = self._policy.victim()
        if chunk is None:
            return False
        assert isinstance(chunk, Chunk)  # noqa: S101  (no other objects are inserted)
        if not self.evict(chunk, taken=True):
            self._drop(chunk, RESET, taken=True)
        return True

    def _drop(self, chunk: Chunk, why: str, *, taken: bool = False) -> None:
        """Remove `chunk` from the index.

        The chunk's slot becomes free now, or after the last read and write have ended.

        `taken` says that the policy does not have the chunk any more.
        """
        index = (self._index if chunk.era is self._era else self._before)[chunk.group]
        if chunk in self.ahead.chunks:
            (self.ahead.forget if why == RESET else self.ahead.dropped)(chunk)
        for mark in chunk.marks:
            if index.get(mark.key) is chunk:
                del index[mark.key]
                self.lost_keys.add(chunk.group, mark.key, why)
        pending = self._pending[chunk.group]
        if chunk.writers:
            for key in [k for k, c in pending.items() if c is chunk]:
                del pending[key]
                self.lost_keys.add(chunk.group, key, why)
        if not taken:
            self._policy.remove(chunk)
            if self._dropped is not None:
                self._dropped(chunk)
        if self.on_drop is not None:
            self.on_drop(chunk)
        if chunk.held:
            chunk.fire(m.EVICT_HELD)
        else:
            chunk.fire(m.EVICT_IDLE)
            self._vacate(chunk)

    def _vacate(self, chunk: Chunk) -> None:
        """Free the slot of a chunk that has become ABSENT."""
        self._chunks[chunk.slot] = None
        self._free.append(chunk.slot)
        if chunk.era is not self._era:
            self.stale -= 1
            if not self.stale:
                for index in self._before:
                    index.clear()  # an empty dict keeps its memory until `clear` is called

    @property
    def evictions_wait(self) -> bool:
        """Whether the holder of a node's memory has yet to carry out evictions."""
        return False

    @property
    def slots_for_pins(self) -> int:
        """The number of slots from which the limit of pinned chunks is computed."""
        return self.slots

    @property
    def writing(self) -> int:
        """The number of pieces that are being written."""
        return sum(chunk.writers for chunk in self._writing)

    @property
    def leases(self) -> int:
        """The number of leases."""
        return sum(map(len, self.leased.values()))

    @property
    def used(self) -> int:
        """The number of slots that are not free."""
        return self.fresh - len(self._free) - self.stale
