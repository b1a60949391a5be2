"""Lookups in tiers. A finder's thread finds the chunks of a prefix whose parts a tier has for all ranks."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence

import anyio

from kvpipe.protocol.limits import RequestLimits
from kvpipe.tiers.base import Key, Listed, TierError
from kvpipe.tiers.first_hash import read_first_hash
from kvpipe.tiers.guard import FIND, GuardedTier
from kvpipe.tiers.parts import BOUND, kept_splits, mark_key, part_keys, splits
from kvpipe.tiers.prefix_keys import PrefixKeys, chunk_name
from kvpipe.tiers.thread import TierThread
from kvpipe.trace.durations import Durations
from kvpipe.trace.log import warn

KEYS_PER_CALL_MAX = 4096
STOP_S_MAX = 5.0
LOOKUPS_MAX = 256
"""The largest number of lookups in progress at once. Further lookups wait, but not beyond their deadlines."""
SPLITS_S = 10.0
"""The time in seconds for which the finder caches the splits that a tier has.

The finder needs these splits only if a lookup did not find all chunks in the engine's own split.
"""

REMEDY = "set the same PYTHONHASHSEED for all engines that share the tier, or for none"

Elsewhere = tuple[str, tuple[int, ...]]
"""(namespace, number of parts of a chunk by cache group). A tier may have chunks under these names."""

ChunkName = tuple[int, bytes]
"""(cache group, name of the chunk in tiers)."""

Place = tuple[int, int]
"""(cache group, units of the prefix at the chunk's end)."""


class TierLookup:
    """One lookup in the tiers. The scheduler's thread makes the lookup, and reads its result after `done` is set."""

    __slots__ = (
        "also", "announced", "deadline_s", "done", "down", "elsewhere", "found", "full", "groups", "keys", "misses",
        "number", "seconds_max", "space", "state_groups", "states", "survey", "tiers", "wanted", "why",
    )  # fmt: skip

    def __init__(
        self,
        prefix: PrefixKeys,
        wanted: tuple[Place, ...],
        *,
        space: str,
        seconds_max: float,
        also: str = "",
        survey: bool = False,
        tiers: frozenset[int] | None = None,
    ) -> None:
        """`wanted` has the places of whole chunks that are not in host memory.

        `space` is the namespace, and `also` is a second namespace with chunks of the same bytes. The request waits
        `seconds_max` seconds, until `deadline_s` of the monotonic clock. `tiers` has the indices of the tiers that may
        be asked, and is None for all tiers. With `survey`, no request waits for this lookup: failures are reported in
        `why`, and do not open a breaker.
        """
        self.keys, self.groups, states, self.state_groups, self.full = prefix
        self.states, self.wanted, self.space, self.also = states or self.keys, wanted, space, also
        self.seconds_max, self.deadline_s = seconds_max, time.monotonic() + seconds_max
        self.found: dict[Place, int] = {}
        """By place: the index of the tier that has the chunk."""
        self.elsewhere: dict[Place, tuple[str, int]] = {}
        """By place: (namespace, number of parts) of a chunk that is stored in another namespace or another split."""
        self.announced: Sequence[Mapping[ChunkName, object]] = ()
        """By index of the tier: the chunks that KV events have announced. Only misses of these chunks are recorded."""
        self.misses: list[tuple[int, ChunkName]] | None = None
        """(index of the tier, name) of each chunk that a tier lacks in this engine's own namespace and split.

        None means that misses are not recorded.
        """
        self.number = 0
        """The number of `kvpipe.scheduler.tier_blocks` when the lookup began."""
        self.survey, self.tiers, self.why = survey, tiers, ""
        self.down = False  # whether some tier could not be asked
        self.done = False  # written last

    def key(self, place: Place) -> bytes:
        """Return the key of the prefix that ends at `place`."""
        group, units = place
        return (self.keys if group in self.groups else self.states)[units - 1]


class Finder(TierThread[TierLookup]):
    """Finds chunks in tiers for the scheduler. Each scheduler process has one finder."""

    def __init__(
        self,
        tiers: Sequence[GuardedTier],
        *,
        ranks: int,
        units_per_chunk: int,
        fault: Callable[[str, str, str], object],
        share_ranks_max: int = 1,
        durations: Durations | None = None,
    ) -> None:
        """Start the thread for an engine with `ranks` ranks. `share_ranks_max` is explained in `kept_splits`.

        The finder calls `fault(tier, use, why)` for every failed call to a tier.
        """
        self._share_ranks_max = share_ranks_max
        self._localities = [tier.spec.locality for tier in tiers]
        self._ranks, self._per_chunk, self._fault = ranks, units_per_chunk, fault
        self.unreadable: frozenset[int] = frozenset()
        """The indices of tiers that some rank does not read at present. The scheduler's thread sets this attribute."""
        self.heads: tuple[int, ...] = ()
        """By group: the number of KV heads of all ranks (`kvpipe.tiers.parts`). Set by the scheduler's thread."""
        self.first_hash = ""
        """The first hash of this engine's keys, or "" to compare no hashes. Set by the scheduler's thread."""
        self.other_hashes: dict[str, float] = {}
        """By tier: 1 if the engine that last used this engine's namespace had another first hash, else 0."""
        self._compared: set[tuple[int, str]] = set()
        self._others: dict[tuple[int, str], tuple[float, list[Elsewhere]]] = {}
        self._limit = anyio.Semaphore(LOOKUPS_MAX)
        durations = Durations() if durations is None else durations
        self._took = {tier.name: durations.of_tier(tier.name, FIND) for tier in tiers}
        super().__init__("kvpipe-finder", tiers)

    def look_up(self, lookup: TierLookup) -> None:
        """Begin `lookup`. Never blocks. A lookup that cannot begin is `done` at once, and has found no chunks."""
        self._begin(lookup)

    def survey(self, place: int, lookup: TierLookup) -> None:
        """Begin `lookup` as a survey of only the tier with the index `place`. Never blocks. Called on any thread."""
        if not self.loop.put(functools.partial(self._begin_survey, place, lookup)):
            _end_survey(lookup, "the engine is shutting down")

    def stored(self, place: int, space: str, chunk: bytes, group: int) -> None:
        """Record that all ranks stored a chunk in the tier with the index `place`, so that later lookups find it."""
        guard = self.tiers[place]
        if isinstance(guard.tier, Listed):
            keys = part_keys(space, chunk, group, self.split(group), self._ranks)
            try:
                guard.tier.stored([guard.sealer.names(key)[0] for key in keys])
            except Exception as error:  # noqa: BLE001  (a bug in the tier; the chunk is then a miss)
                self._fault(guard.name, FIND, repr(error))

    def split(self, group: int) -> int:
        """Return the number of parts in which this engine stores a chunk of the group (`kvpipe.tiers.parts`)."""
        return kept_splits(self.heads, self._ranks, self._share_ranks_max)[group] if self.heads else BOUND

    def parts(self, group: int) -> int:
        """Return the number of values in which a tier keeps a chunk of the group."""
        return self.split(group) or self._ranks

    @property
    def usable(self) -> bool:
        """Whether any tier can be asked."""
        return self.alive and any(self._asks(place) for place in range(len(self.tiers)))

    def asked(self, limits: RequestLimits) -> frozenset[int] | None:
        """Return the indices of the tiers that a request with `limits` may ask, or None for all tiers."""
        if limits.load_tiers is None:
            return None
        return frozenset(at for at, locality in enumerate(self._localities) if limits.asks(locality))

    def _asks(self, place: int) -> bool:
        return place not in self.unreadable and self.tiers[place].breakers[FIND].allows

    def stop(self, seconds_max: float = STOP_S_MAX) -> None:
        """End the thread within `seconds_max`, and close the tiers. Later calls have no effect."""
        super().stop(seconds_max)

    # ---- the loop thread ------------------------------------------------------------------------------------------

    async def _work(self, lookup: TierLookup) -> None:
        try:
            with anyio.move_on_after(lookup.seconds_max * 2):  # a last resort, because each call has a shorter limit
                async with self._limit:
                    await self._find(lookup, lookup.wanted)
                    await self._find(lookup, (*self._partial(lookup), *self._other_states(lookup)))
        except Exception as error:  # noqa: BLE001  (a bug in a tier must not end other lookups)
            self._fault("", FIND, repr(error))
        finally:
            self._refuse(lookup)

    def _begin_survey(self, place: int, lookup: TierLookup) -> None:
        if self._group is None or self._over:
            _end_survey(lookup, "the tier is not open yet")
        else:
            self._group.start_soon(self._survey, place, lookup)

    async def _survey(self, place: int, lookup: TierLookup) -> None:
        """Find the chunks that the tier with the index `place` has, unless the tier is not used at present."""
        why, breaker = "no answer in time", self.tiers[place].breakers[FIND]
        try:
            with anyio.move_on_after(lookup.seconds_max):
                if place in self.unreadable:
                    why = "some rank does not read this tier at present"
                elif not breaker.allows:
                    why = f"the tier is not used: its breaker is {breaker.state.row}"
                else:
                    await self._find_at(place, lookup, lookup.wanted)
                    await self._find_at(place, lookup, (*self._partial(lookup), *self._other_states(lookup)))
                    why = lookup.why or (why if lookup.down else "")
        except Exception as error:  # noqa: BLE001  (a bug in the tier is reported in `lookup.why`)
            why = repr(error)
        finally:
            _end_survey(lookup, why)

    def _refuse(self, lookup: TierLookup) -> None:
        lookup.done = True
        self._ended += 1

    def _partial(self, lookup: TierLookup) -> tuple[Place, ...]:
        """Return the possible ends of the partial chunk after each group's last full hit."""
        out: list[Place] = []
        for group in lookup.groups:
            missing = [units for g, units in lookup.wanted if g == group and (g, units) not in lookup.found]
            whole = len(lookup.keys) // self._per_chunk * self._per_chunk
            base = min(missing) - self._per_chunk if missing else whole
            stop = min(base + self._per_chunk, len(lookup.keys) + 1)
            out += [(group, units) for units in range(base + 1, stop)]
        return tuple(out)

    def _other_states(self, lookup: TierLookup) -> list[Place]:
        """Return the places of the other state groups to ask for, from the longest prefix to the shortest."""
        missing = [
            units for group, units in lookup.wanted if group in lookup.full and (group, units) not in lookup.found
        ]
        stop = min(missing, default=len(lookup.keys) + 1)
        ends = [units for group, units in lookup.found if group in lookup.state_groups[:1] and units < stop]
        return [(group, units) for units in sorted(ends, reverse=True) for group in lookup.state_groups[1:]]

    async def _find(self, lookup: TierLookup, places: tuple[Place, ...]) -> None:
        for index in range(len(self.tiers)):
            left = [place for place in places if place not in lookup.found]
            if not left:
                return
            if lookup.tiers is not None and index not in lookup.tiers:
                continue
            if self._asks(index):
                await self._find_at(index, lookup, left)
            else:
                lookup.down = True

    async def _find_at(self, index: int, lookup: TierLookup, places: Sequence[Place]) -> None:
        """Find the places in `places` that the tier with the index `index` holds."""
        if not await self._ready(self.tiers[index], lookup):
            lookup.down = True
            return
        if self.first_hash and (index, lookup.space) not in self._compared:
            await self._compare(index, lookup)
        own = {group: self.split(group) for group, _ in places}
        await self._find_in(index, lookup, places, lookup.space, own)
        left = [place for place in places if place not in lookup.found]
        if left:
            # half of the time, because the found places must be reported before the deadline
            seconds = (lookup.deadline_s - time.monotonic()) / 2
            with anyio.move_on_after(seconds) as waited:
                await self._find_elsewhere(index, lookup, left)
            lookup.down |= waited.cancelled_caught

    async def _compare(self, index: int, lookup: TierLookup) -> None:
        """Warn once if the previous engine had another first hash, because these two engines share no chunks."""
        tier, left_s = self.tiers[index], lookup.deadline_s - time.monotonic()
        self._compared.add((index, lookup.space))
        try:
            with anyio.fail_after(min(tier.timeout_s, max(0.0, left_s) / 2)):
                found = await read_first_hash(tier, tier.sealer, lookup.space)
        except (TierError, TimeoutError):  # the lookup itself reports the failure, and the next lookup compares again
            self._compared.discard((index, lookup.space))
            return
        differs = found not in {"", self.first_hash}
        self.other_hashes[tier.name] = max(self.other_hashes.get(tier.name, 0.0), float(differs))
        if differs:
            warn("first_hash_differs", tier=tier.name, theirs=found, here=self.first_hash, remedy=REMEDY)

    async def _find_elsewhere(self, index: int, lookup: TierLookup, left: list[Place]) -> None:
        """Find the places `left` in the tier with the index `index`, under the names of other splits.

        First, the tier is asked for the first chunk of each group. The tier is asked for other chunks only if it has
        one of these first chunks, or if `left` contains no whole chunk.
        """
        for space, split in await self._elsewhere(index, lookup):
            parts = dict(enumerate(split))
            left = [(group, units) for group, units in left if (group, units) not in lookup.found]
            other = [(group, units) for group, units in left if (space, parts[group]) != self._own(lookup, group)]
            whole = [(g, units) for g, units in other if g in lookup.groups and units % self._per_chunk == 0]
            first = list({group: (group, units) for group, units in sorted(whole, reverse=True)}.values())
            await self._find_in(index, lookup, first, space, parts)
            if not first or any(place in lookup.found for place in first):
                other = [place for place in other if place not in first]
                await self._find_in(index, lookup, other, space, parts)

    def _own(self, lookup: TierLookup, group: int) -> tuple[str, int]:
        """Return (namespace, number of parts) in which this engine stores the group's chunks."""
        return lookup.space, self.split(group)

    async def _find_in(
        self, index: int, lookup: TierLookup, places: Sequence[Place], space: str, split: dict[int, int]
    ) -> None:
        """Find the chunks of `places` that the tier with the index `index` holds in the namespace `space`.

        `split` has the number of parts of a chunk, by group.
        """
        tier = self.tiers[index]
        parts = max((split[group] or self._ranks for group, _ in places), default=1)
        count = max(1, KEYS_PER_CALL_MAX // (parts * tier.sealer.ways))
        for first in range(0, len(places), count):
            there = await self._exists(tier, lookup, places[first : first + count], space, split)
            if there is None:
                lookup.down = True
                return
            if lookup.misses is not None and (announced := lookup.announced[index]):
                present = {*there, *lookup.found}
                left = (place for place in places[first : first + count] if place not in present)
                own = (place for place in left if (space, split[place[0]]) == self._own(lookup, place[0]))
                names = ((place[0], chunk_name(lookup.key(place))) for place in own)
                lookup.misses += [(index, name) for name in names if name in announced]
            lookup.found.update(dict.fromkeys(there, index))
            under = {group: (space, split[group]) for group, _ in there}
            other = [place for place in there if under[place[0]] != self._own(lookup, place[0])]
            lookup.elsewhere.update((place, under[place[0]]) for place in other)

    async def _elsewhere(self, index: int, lookup: TierLookup) -> list[Elsewhere]:
        """Return the other namespaces and splits under which the tier may hold chunks that this engine can use."""
        tier, place, now_s = self.tiers[index], (index, lookup.space), time.monotonic()
        asked_s, known = self._others.get(place, (-SPLITS_S, []))
        own = tuple(self.split(group) for group in range(len(self.heads)))
        candidates = [(lookup.space, split) for split in splits(self.heads, self._ranks, self._share_ranks_max)]
        candidates += [(lookup.also, own)] if lookup.also and own else []
        if not candidates or now_s - asked_s < SPLITS_S:
            return known
        there = await self._have(tier, lookup, [tier.sealer.names(mark_key(*one)) for one in candidates])
        if there is not None:
            known = [one for one, is_there in zip(candidates, there, strict=True) if is_there]
            self._others = {place: (now_s, known)} | {at: one for at, one in self._others.items() if at[0] != index}
        return known

    async def _ready(self, tier: GuardedTier, lookup: TierLookup) -> bool:
        """Wait until `tier` is open, for at most half of the remaining time. The second half is for other tiers."""
        left_s = lookup.deadline_s - time.monotonic()
        with anyio.move_on_after(left_s / 2) as waited:
            await tier.ready()
        if waited.cancelled_caught and left_s > 0:
            self._failed(lookup, tier, "the tier is still being opened")
        return not waited.cancelled_caught

    async def _exists(
        self, tier: GuardedTier, lookup: TierLookup, places: Sequence[Place], space: str, split: dict[int, int]
    ) -> list[Place] | None:
        """Return the places of the chunks of which `tier` holds every part, or None if the call to the tier failed."""
        names, owners = list[tuple[Key, ...]](), list[Place]()
        for group, units in places:
            chunk = chunk_name(lookup.key((group, units)))
            keys = part_keys(space, chunk, group, split[group], self._ranks)
            names += map(tier.sealer.names, keys)
            owners += [(group, units)] * len(keys)
        there = await self._have(tier, lookup, names)
        if there is None:
            return None
        missing = {place for place, is_there in zip(owners, there, strict=True) if not is_there}
        return [place for place in places if place not in missing]

    async def _have(self, tier: GuardedTier, lookup: TierLookup, names: list[tuple[Key, ...]]) -> list[bool] | None:
        """Return, for each value, whether `tier` holds the value under any of its names. None: the call failed."""
        left_s = lookup.deadline_s - time.monotonic()
        if left_s <= 0:  # earlier tiers have used up the time
            return None
        began_s = time.monotonic()
        try:
            with anyio.fail_after(min(tier.timeout_s, left_s)):
                there = await tier.exists([name for some in names for name in some])
        except TimeoutError:  # the lookup had less time than the tier's limit, so one timeout does not open the breaker
            self._failed(lookup, tier, "no answer in time", slow=left_s >= tier.timeout_s)
            return None
        except TierError as error:
            self._failed(lookup, tier, str(error))
            return None
        finally:
            self._took[tier.name](time.monotonic() - began_s)
        if not lookup.survey:
            tier.breakers[FIND].ok()
        ways = tier.sealer.ways
        return [any(there[at : at + ways]) for at in range(0, len(there), ways)]

    def _failed(self, lookup: TierLookup, tier: GuardedTier, why: str, *, slow: bool = False) -> None:
        if lookup.survey:
            lookup.why = lookup.why or why
            return
        self._fault(tier.name, FIND, why)
        tier.fault(FIND, why, slow=slow)


def _end_survey(lookup: TierLookup, why: str) -> None:
    lookup.why = why
    lookup.done = True
