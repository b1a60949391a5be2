"""Lookups in tiers, in a thread beside the scheduler's: of which chunks of a prefix a tier has every rank's part."""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Callable, Sequence

import anyio

from kvpipe.tiers.base import Key, Listed, TierError
from kvpipe.tiers.first_hash import read_first_hash
from kvpipe.tiers.guard import FIND, GuardedTier
from kvpipe.tiers.parts import BOUND, kept_splits, mark_key, part_keys, splits
from kvpipe.tiers.thread import TierThread
from kvpipe.trace.log import warn

KEYS_PER_CALL_MAX = 4096
STOP_S_MAX = 5.0
LOOKUPS_MAX = 256
"""Lookups under way at once; more wait, at most until their deadline."""
SPLITS_S = 10.0
"""How long the finder remembers which other splits a tier has. It asks only if a lookup misses something."""
NAME_BYTES = 32
"""Length of a chunk's name in bytes, as of vLLM's hashes."""

REMEDY = "set the same PYTHONHASHSEED for all engines that share the tier, or for none"

Elsewhere = tuple[str, tuple[int, ...]]
"""A namespace, and by cache group, the number of parts in which a tier may have its chunks."""

Place = tuple[int, int]
"""(cache group, units of the prefix at the chunk's end)."""


class TierLookup:
    """One lookup in the tiers. The scheduler's thread makes it, and reads the answer once it is `done`."""

    __slots__ = (
        "also", "deadline_s", "done", "down", "elsewhere", "found", "full", "groups", "keys", "seconds_max", "space",
        "state_groups", "states", "survey", "wanted", "why",
    )  # fmt: skip

    def __init__(
        self,
        keys: Sequence[bytes],
        wanted: tuple[Place, ...],
        *,
        groups: Sequence[int],
        space: str,
        seconds_max: float,
        also: str = "",
        states: Sequence[bytes] = (),
        state_groups: Sequence[int] = (),
        full: Sequence[int] = (),
        survey: bool = False,
    ) -> None:
        """`keys[u]`: key of the first u + 1 units. `wanted`: whole chunks that are not in memory.

        `groups`: the groups of attention, whose last chunk may be shorter. `states[u]`: the same key for states.
        `state_groups`: the groups of states. A boundary is of use only if all of them are found there, so the tiers are
        asked for the others at those boundaries where the first one was found. `full`: the groups of full attention:
        boundaries behind a missing chunk of these are not asked for.
        `space`: the namespace. `also`: a second namespace with chunks of the same bytes.
        `seconds_max`: how long the request waits, until `deadline_s` of the monotonic clock.
        `survey`: no request waits for it. Its failures are in `why`, and open no breaker.
        """
        self.keys, self.wanted, self.groups, self.space, self.also = keys, wanted, groups, space, also
        self.states, self.state_groups, self.full = states or keys, state_groups, full
        self.seconds_max, self.deadline_s = seconds_max, time.monotonic() + seconds_max
        self.found: dict[Place, int] = {}
        """The places that were found, each with the index of its tier."""
        self.elsewhere: dict[Place, tuple[str, int]] = {}
        """Of these, the places whose chunks this engine would store differently: (namespace, number of parts)."""
        self.survey, self.why = survey, ""
        self.down = False  # a tier could not be asked
        self.done = False  # written last

    def key(self, place: Place) -> bytes:
        """Return the key of the prefix that ends at `place`."""
        group, units = place
        return (self.keys if group in self.groups else self.states)[units - 1]


class Finder(TierThread[TierLookup]):
    """One per scheduler's process."""

    def __init__(
        self,
        tiers: Sequence[GuardedTier],
        *,
        ranks: int,
        units_per_chunk: int,
        fault: Callable[[str, str, str], object],
        share_ranks_max: int = 1,
    ) -> None:
        """Start the thread. `ranks`: of this engine. `share_ranks_max`: see `kept_splits`.

        `fault(tier, use, why)` is called for every failed call of a tier.
        """
        self._share_ranks_max = share_ranks_max
        self._ranks, self._per_chunk, self._fault = ranks, units_per_chunk, fault
        self.unreadable: frozenset[int] = frozenset()
        """The indices of tiers that some rank does not read at present. Set by the scheduler's thread."""
        self.heads: tuple[int, ...] = ()
        """KV heads per group, of all ranks; see `kvpipe.tiers.parts`. Set by the scheduler's thread before lookups."""
        self.first_hash = ""
        """The first hash of this engine's keys. The scheduler's thread sets it before lookups. "": not compared."""
        self.other_hashes: dict[str, float] = {}
        """By tier, whether an engine with another first hash has used this engine's namespace last: 1 or 0."""
        self._compared: set[tuple[int, str]] = set()
        self._others: dict[tuple[int, str], tuple[float, list[Elsewhere]]] = {}
        self._limit = anyio.Semaphore(LOOKUPS_MAX)
        super().__init__("kvpipe-finder", tiers)

    def ask(self, lookup: TierLookup) -> None:
        """Begin `lookup`. Never blocks. A lookup that cannot be made is `done` at once, with nothing found."""
        self._begin(lookup)

    def survey(self, place: int, lookup: TierLookup) -> None:
        """Begin a survey of the tier with the index `place` only. On any thread; never blocks."""
        if not self.loop.put(functools.partial(self._begin_survey, place, lookup)):
            _end_survey(lookup, "the engine ends")

    def stored(self, place: int, space: str, chunk: bytes, group: int) -> None:
        """Every rank has stored a chunk in the tier with the index `place`: later lookups find it at once."""
        guard = self.tiers[place]
        if isinstance(guard.tier, Listed):
            keys = part_keys(space, chunk, group, self.split(group), self._ranks)
            try:
                guard.tier.stored([guard.sealer.names(key)[0] for key in keys])
            except Exception as error:  # noqa: BLE001  (a bug of the tier's: what it does not list is a miss)
                self._fault(guard.name, FIND, repr(error))

    def split(self, group: int) -> int:
        """Return the number of parts in which this engine stores the group's chunks; see `kvpipe.tiers.parts`."""
        return kept_splits(self.heads, self._ranks, self._share_ranks_max)[group] if self.heads else BOUND

    @property
    def usable(self) -> bool:
        """Whether any tier can be asked."""
        return self.alive and any(self._asks(place) for place in range(len(self.tiers)))

    def _asks(self, place: int) -> bool:
        return place not in self.unreadable and self.tiers[place].breakers[FIND].allows

    def stop(self, seconds_max: float = STOP_S_MAX) -> None:
        """End the thread within `seconds_max`, and close the tiers. Idempotent."""
        super().stop(seconds_max)

    # ---- the loop thread ------------------------------------------------------------------------------------------

    async def _work(self, lookup: TierLookup) -> None:
        try:
            with anyio.move_on_after(lookup.seconds_max * 2):  # a backstop: its calls have shorter limits
                async with self._limit:
                    await self._find(lookup, lookup.wanted)
                    await self._find(lookup, (*self._partial(lookup), *self._other_states(lookup)))
        except Exception as error:  # noqa: BLE001  (a bug of a tier's: other lookups go on)
            self._fault("", FIND, repr(error))
        finally:
            self._refuse(lookup)

    def _begin_survey(self, place: int, lookup: TierLookup) -> None:
        if self._group is None or self._over:
            _end_survey(lookup, "it is not open")
        else:
            self._group.start_soon(self._survey, place, lookup)

    async def _survey(self, place: int, lookup: TierLookup) -> None:
        """Find what the tier with the index `place` holds, unless it is not used at present."""
        why, breaker = "no answer in time", self.tiers[place].breakers[FIND]
        try:
            with anyio.move_on_after(lookup.seconds_max):
                if place in self.unreadable:
                    why = "some rank leaves it alone"
                elif not breaker.allows:
                    why = f"it is left alone ({breaker.state.row})"
                else:
                    await self._find_at(place, lookup, lookup.wanted)
                    await self._find_at(place, lookup, (*self._partial(lookup), *self._other_states(lookup)))
                    why = lookup.why or (why if lookup.down else "")
        except Exception as error:  # noqa: BLE001  (a bug of the tier's: it is reported)
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
        """Return the boundaries at which to ask for the other groups of states, the longest first."""
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
            if self._asks(index):
                await self._find_at(index, lookup, left)
            else:
                lookup.down = True

    async def _find_at(self, index: int, lookup: TierLookup, places: Sequence[Place]) -> None:
        """Find those of `places` that the tier with this index holds."""
        if not await self._ready(self.tiers[index], lookup):
            lookup.down = True
            return
        if self.first_hash and (index, lookup.space) not in self._compared:
            await self._compare(index, lookup)
        own = {group: self.split(group) for group, _ in places}
        await self._find_in(index, lookup, places, lookup.space, own)
        left = [place for place in places if place not in lookup.found]
        if left:
            seconds = (lookup.deadline_s - time.monotonic()) / 2  # leaves time to report what was found
            with anyio.move_on_after(seconds) as waited:
                await self._find_elsewhere(index, lookup, left)
            lookup.down |= waited.cancelled_caught

    async def _compare(self, index: int, lookup: TierLookup) -> None:
        """Say once if the engine before has another first hash: it shares nothing with this engine."""
        tier, left_s = self.tiers[index], lookup.deadline_s - time.monotonic()
        self._compared.add((index, lookup.space))
        try:
            with anyio.fail_after(min(tier.timeout_s, max(0.0, left_s) / 2)):
                found = await read_first_hash(tier, tier.sealer, lookup.space)
        except (TierError, TimeoutError):  # the lookup itself finds what is wrong; the next one compares
            self._compared.discard((index, lookup.space))
            return
        differs = found not in {"", self.first_hash}
        self.other_hashes[tier.name] = max(self.other_hashes.get(tier.name, 0.0), float(differs))
        if differs:
            warn("first_hash_differs", tier=tier.name, theirs=found, here=self.first_hash, remedy=REMEDY)

    async def _find_elsewhere(self, index: int, lookup: TierLookup, left: list[Place]) -> None:
        """Find the places `left` in the tier with this index, under the names of other splits.

        A group's first chunk is asked for first, and the rest only if that is there.
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
        """Find the chunks of `places` that the tier with this index holds in the namespace `space`.

        `split`: by group, the number of parts of a chunk.
        """
        tier = self.tiers[index]
        parts = max((split[group] or self._ranks for group, _ in places), default=1)
        count = max(1, KEYS_PER_CALL_MAX // (parts * tier.sealer.ways))
        for first in range(0, len(places), count):
            there = await self._exists(tier, lookup, places[first : first + count], space, split)
            if there is None:
                lookup.down = True
                return
            lookup.found.update(dict.fromkeys(there, index))
            under = {group: (space, split[group]) for group, _ in there}
            other = [place for place in there if under[place[0]] != self._own(lookup, place[0])]
            lookup.elsewhere.update((place, under[place[0]]) for place in other)

    async def _elsewhere(self, index: int, lookup: TierLookup) -> list[Elsewhere]:
        """Return the other namespaces and splits in which the tier with this index may hold this engine's chunks."""
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
        """Wait for a tier that is still being opened, for half of the time left: other tiers are asked, too."""
        left_s = lookup.deadline_s - time.monotonic()
        with anyio.move_on_after(left_s / 2) as waited:
            await tier.ready()
        if waited.cancelled_caught and left_s > 0:
            self._failed(lookup, tier, "it is still being opened")
        return not waited.cancelled_caught

    async def _exists(
        self, tier: GuardedTier, lookup: TierLookup, places: Sequence[Place], space: str, split: dict[int, int]
    ) -> list[Place] | None:
        """Return those of `places` of which `tier` holds every part; None if it could not be asked."""
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
        """Return, for each value, whether `tier` holds it under any of its names; None if it could not be asked."""
        left_s = lookup.deadline_s - time.monotonic()
        if left_s <= 0:  # spent on others
            return None
        try:
            with anyio.fail_after(min(tier.timeout_s, left_s)):
                there = await tier.exists([name for some in names for name in some])
        except TimeoutError:  # the lookup's own limit is often the shorter: then it takes several to be sure
            self._failed(lookup, tier, "no answer in time", slow=left_s >= tier.timeout_s)
            return None
        except TierError as error:
            self._failed(lookup, tier, str(error))
            return None
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


def chunk_name(key: bytes) -> bytes:
    """Return a chunk's name in tiers, at most `NAME_BYTES` long: its key, or the SHA-256 of a longer one.

    Keys of chunks computed with an adapter are longer: the adapter's digest is appended to the prefix hash.
    """
    return hashlib.sha256(key).digest() if len(key) > NAME_BYTES else key
