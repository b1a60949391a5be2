"""The catalog: which chunk is in which slot, who reads and who writes it. One per engine, on the scheduler's thread.

A chunk can be found under the keys of its *marks*. A mark (units, key) means: the first `units` units of the chunk have
landed on every rank, and `key` is the hash of the token prefix up to there. Most chunks have one mark. A lookup is a
few dict probes. Leases belong to (request, epoch) pairs; a leased chunk is never evicted.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import NamedTuple

import msgspec

from kvpipe.cache.ahead import Ahead
from kvpipe.cache.hints import Hint
from kvpipe.cache.large import Ordered, by_key, order, untracked
from kvpipe.cache.miss_reasons import EVICTED, RESET, TORN, Lost
from kvpipe.cache.policy.base import AnsweredPolicy, Policy, RememberingPolicy, SessionPolicy, SizedPolicy
from kvpipe.cache.policy.batches import batches
from kvpipe.cache.policy.guard import RescuedPolicy, takes_hints
from kvpipe.cache.tenants import ANYBODY, Tenant, Tenants
from kvpipe.statemachine import chunk as m
from kvpipe.statemachine.core import Compiled, Cursor, Watch
from kvpipe.trace.log import Counters

KEPT_MARKS_MAX = 4
SWEEP_SLOTS = 64
"""How many slots one call of `sweep` examines for chunks that a reset has forgotten."""


class Owner(NamedTuple):
    """Who holds a lease: one admission of one request."""

    request: str
    epoch: int


class Mark(msgspec.Struct, frozen=True, gc=False):
    """The first `units` units of the chunk can be found under `key`. `keep`: it stays when the chunk grows."""

    units: int
    key: bytes
    keep: bool


class Chunk(Cursor):
    """One slot's content. Its cursor is the chunk machine.

    The garbage collector does not see it (`large.untracked`): nothing that it refers to may refer to it or the catalog.
    """

    __slots__ = (
        "before", "era", "group", "identity", "keeps", "leases", "marks", "place", "ready", "slot", "tail", "tenant",
        "used_s", "writers", "written",
    )  # fmt: skip

    def __init__(
        self, machine: Compiled, group: int, slot: int, watch: Watch | None = None, tenant: Tenant = ANYBODY
    ) -> None:
        """Make the chunk of `slot` in cache group `group`. Its other attributes are as follows.

        `written`: units claimed by writers. `ready`: units that have landed on every rank.
        `tail`: the prefix hash at `written`; only a request with that prefix may write on.
        `keeps`: key of the mark that another request used last. `before`: key of the chunk before it in the prefix; b""
        for the first. `used_s`: the second of its last use, by the catalog's clock; not updated while it is held.
        `era`: number of the reset after which it was made, one object for all its chunks.
        `identity`: key of its longest mark, and its era: equal for equal content, but never across a reset.
        `place`: the policy's own, see `Evictable`.
        """
        self.machine, self.key, self.state, self.watch = machine, slot, machine.initial, watch  # as a cursor's
        self.group, self.slot, self.tenant = group, slot, tenant
        self.written = self.ready = self.writers = self.leases = self.used_s = self.place = 0
        self.marks: tuple[Mark, ...] = ()
        self.tail = self.keeps = self.before = self.era = self.identity = b""
        untracked(self)

    @property
    def held(self) -> bool:
        """Whether anybody reads or writes it."""
        return self.writers > 0 or self.leases > 0


class Piece(msgspec.Struct, frozen=True, gc=False):
    """Units [start, stop) of a chunk, being written by one job. Found under `key` once they have landed.

    `keep`: as of `Mark`. `base`: the number of units of the prefix before the chunk.
    """

    chunk: Chunk
    start: int
    stop: int
    key: bytes
    keep: bool
    base: int = 0


class Catalog:
    """The authority over slots, keys and leases."""

    sweep_slots = SWEEP_SLOTS

    def __init__(
        self, slots: int, groups: int, policy: Policy, counters: Counters, *, ready: int | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:  # fmt: skip
        """Make an empty catalog of `slots` slots for `groups` cache groups.

        `ready`: how many slots, from the first on, may be used already; None: all. `clock`: returns seconds that never
        go back; None: `time.monotonic`.
        """
        self.slots, self._policy, self.counters = slots, policy, counters
        self._clock = clock
        self._batches = batches(policy)
        self._request = policy.request if isinstance(policy, SessionPolicy) else None
        self._answered = policy.answered if isinstance(policy, AnsweredPolicy) else None
        self._hint = policy.hint if takes_hints(policy) else None
        self._dropped = policy.dropped if isinstance(policy, RememberingPolicy) else None
        self.machine = m.CHUNK.compile()
        self.watch: Watch | None = None  # of the chunks that are reserved from now on
        self.on_drop: Callable[[Chunk], object] | None = None  # called for chunks that cannot be found any more
        self.lost_keys, self.tenants = Lost(groups), Tenants()
        self.ready = slots if ready is None else ready
        self._free: list[int] = []  # used before
        self.fresh = 0
        """The first slot that was never handed out. No later slot was handed out either."""
        self._index: tuple[MutableMapping[bytes, Chunk], ...] = tuple(by_key(slots) for _ in range(groups))
        self._before: tuple[MutableMapping[bytes, Chunk], ...] = tuple(by_key(slots) for _ in range(groups))
        """Per group, the keys of chunks of before the last reset, as long as these have slots."""
        self._pending: tuple[dict[bytes, Chunk], ...] = tuple({} for _ in range(groups))
        self._writing: dict[Chunk, None] = {}
        self._era, self._swept = b"", 0
        self.stale = 0
        """How many slots hold chunks that a reset has forgotten. They count as free."""
        self._chunks: list[Chunk | None] = [None] * slots  # all that are not ABSENT, each at its slot
        untracked(self._chunks)
        self._guard = policy if isinstance(policy, RescuedPolicy) else None
        if self._guard is not None:
            self._guard.bind(self._evictable)
        self._spared: Ordered[Chunk, None] = order(slots)  # evicted before the policy's victims; none is held
        self.ahead = Ahead(counters, self.account_of)
        self.leased: dict[Owner, list[Chunk]] = {}  # changed here alone
        self.leased_since_s: dict[Owner, float] = {}
        self._second = 0  # see `_notify`
        self._size_policy()

    def use_more(self, ready: int) -> None:
        """Use the first `ready` slots, which are in memory on every rank. Fewer than before change nothing."""
        self.ready = max(self.ready, min(ready, self.slots))
        self._size_policy()

    def limit(self, slots: int) -> None:
        """Use no slot from `slots` on: a rank's pool has no more. Called before any of them is used."""
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

    def index(self, group: int) -> Mapping[bytes, Chunk]:
        """Return the group's index, for lookups that probe many keys. Not to be changed."""
        return self._index[group]

    def reset_index(self, group: int) -> Mapping[bytes, object]:
        """Return the keys that the last reset has forgotten, of chunks not yet swept. Not to be changed."""
        return self._before[group]

    def holds(self, chunk: Chunk) -> bool:
        """Whether the catalog still has `chunk`: it was neither evicted nor reset, and may be read and written on."""
        return chunk.state.row not in {m.ABSENT, m.EVICTING} and chunk.era is self._era

    def pending(self, group: int) -> dict[bytes, Chunk]:
        """Return, by key, the chunks of `group` that are being written. Not to be changed."""
        return self._pending[group]

    def at(self, slot: int) -> Chunk | None:
        """Return the chunk in a slot; None if it is free. On any thread."""
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
        """Add leases of `owner` on `chunks`, which last until `release`. `timed`: how old they are is a metric.

        Raises:
            ValueError: a reset has forgotten one of them; those before it in the list are leased.
            IllegalTransition: one cannot be found; the same.

        """
        owned, now_s = self.leased.setdefault(owner, []), self._notify(over=False)
        if timed:
            self.leased_since_s.setdefault(owner, now_s)
        idle: list[Chunk] = []
        era, spared = self._era, self._spared
        try:
            for chunk in chunks:
                if chunk.era is not era:
                    self._check_era(chunk)
                chunk.fire(m.LEASE)
                if not (chunk.leases or chunk.writers):
                    idle.append(chunk)
                    if spared:
                        spared.pop(chunk, None)
                chunk.leases += 1
                owned.append(chunk)  # one by one: a rejected chunk must not hide the leases before it
        finally:
            self._batches.remove_all(idle)

    def release(self, owner: Owner, *, hit: bool = True) -> int:
        """End every lease of `owner`. Returns how many there were. The last chunk leased is evicted first.

        `hit`: a request has used the chunks; the policy counts that.
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
            if chunk.fire(m.DRAINED).moves:  # it was evicted meanwhile
                self._vacate(chunk)
            else:
                chunk.used_s = self._second
                idle.append(chunk)
        self._batches.insert_all(idle, hit=hit)
        return len(chunks)

    def refresh(
        self, chunks: Iterable[Chunk], *, over: bool = True, hit: bool = True, answer: int | None = None
    ) -> None:
        """Count `chunks` as used now. `chunks`: of one request, the last one of its prefix first: it is evicted first.

        `over`: the request has ended. `hit`: it has used them; else they are kept for one that is to come.
        `answer`: how many tokens it has decoded; None: that is not known.
        """
        self._notify(over=over)
        if answer is not None and self._answered is not None:
            self._answered(answer)
        second, spared = self._second, self._spared
        idle: list[Chunk] = []
        for chunk in chunks:
            if not (chunk.writers or chunk.leases):
                chunk.used_s = second
                idle.append(chunk)
                if spared:
                    spared.pop(chunk, None)
        if hit and self.ahead.chunks:
            self.ahead.used(idle)
        self._batches.refresh_all(idle)

    def spare(self, chunks: Iterable[Chunk]) -> int:
        """Mark `chunks` to be evicted before all others, unless they are used again. Returns how many were marked.

        Chunks that are held, or gone, are ignored.
        """
        idle = [one for one in chunks if one.state.row == m.READY and not one.held and one.era is self._era]
        self._spared.update(dict.fromkeys(idle))
        return len(idle)

    @property
    def takes_hints(self) -> bool:
        """Whether the policy takes hints: no longer, once LRU has taken its place."""
        return self._hint is not None and (self._guard is None or self._guard.takes_hints)

    @property
    def now_s(self) -> float:
        """The present time, in seconds of the catalog's clock."""
        return time.monotonic() if self._clock is None else self._clock()

    def hint(self, chunks: Iterable[Chunk], hint: Hint) -> None:
        """Pass a client's hint on a prompt's chunks to the policy, if that takes hints."""
        if self._hint is not None:
            self._notify(over=False)
            for chunk in chunks:
                self._hint(chunk, hint)

    def account_of(self, tenant: Tenant) -> object:
        """Return whose slots a tenant's chunks take: something hashable. Here all take everybody's."""
        del tenant
        return None

    def room_ahead(self, tenant: Tenant) -> int:
        """Return how many more chunks of a tenant may be in memory for announced resumes."""
        return self.ahead.part(tenant).room(self.slots)

    # ---- writing -------------------------------------------------------------------------------------------------

    def reserve(self, group: int, tenant: Tenant = ANYBODY) -> Chunk | None:
        """Claim a slot for a new chunk of `tenant`, evicting one if none is free; None if every chunk is held."""
        if not self._free and self.fresh < self.ready:
            slot, self.fresh = self.fresh, self.fresh + 1
        elif self._free or self._evict_one():
            slot = self._free.pop()  # one used before: it is in the caches of the processor
        else:
            self.counters["save_dropped_pool_full"] += 1
            return None
        chunk = Chunk(self.machine, group, slot, self.watch, tenant)
        chunk.era = self._era
        chunk.fire(m.RESERVE)
        self._chunks[chunk.slot] = chunk
        return chunk

    def write(self, chunk: Chunk, stop: int, key: bytes, *, keep: bool, base: int = 0, before: bytes = b"") -> Piece:
        """Claim units [chunk.written, stop) of `chunk` for one job, and return the piece.

        `key`: the prefix hash at `stop`. `before`: that at `base`, b"" if `base` is 0, or the chunk has it already.
        `keep`, `base`: as of `Piece`.

        Raises:
            ValueError: a reset has forgotten the chunk.
            IllegalTransition: it was evicted.

        """
        self._check_era(chunk)
        if chunk.ready or chunk.writers:
            chunk.fire(m.GROW)
        if chunk.ready and not chunk.held:  # one that has never landed is not known to the policy
            self._policy.remove(chunk)
            self._spared.pop(chunk, None)
        piece = Piece(chunk, chunk.written, stop, key, keep, base)
        chunk.written, chunk.tail = stop, key
        if before:
            chunk.before = before + self._era
        chunk.writers += 1
        self._writing[chunk] = None
        self._pending[chunk.group].setdefault(key, chunk)
        return piece

    def abandon(self, chunk: Chunk) -> None:
        """Free the slot of a reserved chunk of which nothing was written."""
        chunk.fire(m.LOST_LAST)
        self._vacate(chunk)

    def landed(self, piece: Piece, *, over: bool = False) -> bool:
        """Every rank has the piece: it can be found now. `over`: the request that saved it has ended.

        Returns False if its chunk is gone, or an earlier piece of it was lost: the piece is dropped.
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
        """A rank has failed the piece: it and later pieces of its chunk are dropped, earlier ones stay."""
        self._notify(over=False)
        self._unpend(piece)
        self.lost_keys.add(piece.chunk.group, piece.key, TORN)
        self._finish_write(piece.chunk, landed=False)

    def keep_mark(self, chunk: Chunk, key: bytes) -> None:
        """Keep the mark `key`, which may not have landed yet, when the chunk grows: another request has used it."""
        chunk.keeps = key
        chunk.marks = tuple(Mark(mark.units, key, keep=True) if mark.key == key else mark for mark in chunk.marks)

    def evict(self, chunk: Chunk, *, taken: bool = False) -> bool:
        """Evict one chunk, even while it is read or written. Returns False if it is gone already.

        Its slot is free once the last reader and writer are gone. `taken`: the policy has taken it out, as its victim.
        """
        if not self.holds(chunk):
            return False
        self.counters["evicted"] += 1
        self._drop(chunk, EVICTED, taken=taken)
        return True

    def reset(self) -> int:
        """Forget every chunk. Returns how many there were. The slots of held chunks are free once these are released.

        Chunks that nobody holds cannot be found from now on, and their slots count as free; `sweep` drops them later.
        So the call takes time in proportion to the number of held chunks, and, if an earlier reset is not swept yet, to
        the number of chunks saved since.
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
        """Forget all chunks. Those `held` cannot be found any more either, and keep their slots until released."""
        rest = self.used - len(held)
        if rest:
            self._index, self._before, self.stale, self._swept = self._before, self._index, rest, 0
            self._era = (int.from_bytes(self._era) + 1).to_bytes(8)
            for chunk in held:
                chunk.era = self._era

    def sweep(self) -> None:
        """Drop the chunks that the last reset has forgotten in the next `sweep_slots` slots, and free these slots."""
        for _ in range(min(self.sweep_slots, self.fresh - self._swept) if self.stale else 0):
            chunk = self._chunks[self._swept]
            self._swept += 1
            if chunk is not None and chunk.era is not self._era:
                self._drop(chunk, RESET)

    # ---- the rules -----------------------------------------------------------------------------------------------

    def _check_era(self, chunk: Chunk) -> None:
        if chunk.era is not self._era:
            raise ValueError(f"slot {chunk.slot}: a reset has forgotten what it holds")

    def _mark(self, chunk: Chunk, mark: Mark) -> None:
        index = self._index[chunk.group]
        holder = index.get(mark.key)
        if holder is not None and holder is not chunk:
            return  # another request's copy of the same prefix was quicker: ours stays findable by what it had
        kept: Sequence[Mark] = ()
        if chunk.marks:  # it has grown
            kept = [old for old in chunk.marks if old.keep and old.units < mark.units][-(KEPT_MARKS_MAX - 1) :]
            for old in chunk.marks:
                if old not in kept and index.get(old.key) is chunk:
                    del index[old.key]
        chunk.marks = (*kept, mark)  # which the collector leaves alone once it has seen it
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
        chunk.written = chunk.ready  # only now: a lost piece's neighbours may still be writing beyond it
        if not chunk.marks:  # the same content was published from another slot meanwhile
            self._drop(chunk, EVICTED)
        elif not chunk.leases:
            chunk.used_s = self._second
            self._policy.insert(chunk, hit=False)

    def _notify(self, *, over: bool) -> float:
        """Read the clock and return it; pass it to a `SessionPolicy`, with whether the request is `over`."""
        now_s = time.monotonic() if self._clock is None else self._clock()  # as `now_s`, and quicker
        if now_s - self._second >= 1.0:
            self._second = int(now_s)  # one object for all that is of use in it
        if self._request is not None:
            self._request(now_s, over=over)
        return now_s

    def _evictable(self) -> list[Chunk]:
        """Return all chunks that may be evicted, those used longest ago first. It looks at every slot."""
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
        taken = not self._spared
        chunk = self._policy.victim() if taken else next(iter(self._spared))
        if chunk is None:
            return False
        assert isinstance(chunk, Chunk)  # noqa: S101  (nothing else is ever inserted)
        if not self.evict(chunk, taken=taken):
            self._drop(chunk, RESET, taken=taken)
        return True

    def _drop(self, chunk: Chunk, why: str, *, taken: bool = False) -> None:
        """Take `chunk` out of the index; free its slot now, or when the last reader and writer are gone.

        `taken`: it is no longer in the policy, and not spared.
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
            self._spared.pop(chunk, None)
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
        """The chunk is ABSENT: its slot is free."""
        self._chunks[chunk.slot] = None
        self._free.append(chunk.slot)
        if chunk.era is not self._era:
            self.stale -= 1
            if not self.stale:
                for index in self._before:
                    index.clear()  # it is empty: what it has grown to is given back

    @property
    def writing(self) -> int:
        """How many pieces are being written."""
        return sum(chunk.writers for chunk in self._writing)

    @property
    def leases(self) -> int:
        """How many leases are held."""
        return sum(map(len, self.leased.values()))

    @property
    def used(self) -> int:
        """The number of slots that are not free."""
        return self.fresh - len(self._free) - self.stale
