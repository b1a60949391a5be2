"""Lookups in tiers, beside the scheduler's thread: which chunks of a prefix are there, on every rank."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence

import anyio

from kvpipe.tiers.base import Key, Listed, TierError
from kvpipe.tiers.guard import FIND, GuardedTier
from kvpipe.tiers.thread import TierThread

KEYS_PER_CALL_MAX = 4096
STOP_S_MAX = 5.0
LOOKUPS_MAX = 256
"""Lookups under way at once; more wait, at most until their deadline."""
NAME_BYTES = 32
"""Of a chunk's name, as of vLLM's hashes."""

Place = tuple[int, int]
"""A cache group, and the units of the prefix that a chunk ends at."""


class TierLookup:
    """One question. The scheduler's thread makes it, and reads the answer once it is `done`."""

    __slots__ = (
        "deadline_s", "done", "down", "found", "groups", "keys", "seconds_max", "space", "wanted",
    )  # fmt: skip

    def __init__(
        self,
        keys: Sequence[bytes],
        wanted: tuple[Place, ...],
        *,
        groups: Sequence[int],
        space: str,
        seconds_max: float,
    ) -> None:
        """`keys[u]`: hash of the first u + 1 units. `wanted`: whole chunks that are not in memory.

        `groups`: those whose last chunk may be shorter.
        `seconds_max`: for how long the request waits; until `deadline_s`, by the monotonic clock.
        """
        self.keys, self.wanted, self.groups, self.space = keys, wanted, groups, space
        self.seconds_max, self.deadline_s = seconds_max, time.monotonic() + seconds_max
        self.found: dict[Place, int] = {}
        """In which tier, by its place in the order, each place that was found is."""
        self.down = False  # a tier could not be asked
        self.done = False  # written last


class Finder(TierThread[TierLookup]):
    """One per scheduler's process."""

    def __init__(
        self,
        tiers: Sequence[GuardedTier],
        *,
        ranks: int,
        units_per_chunk: int,
        fault: Callable[[str, str, str], object],
    ) -> None:
        """Start the thread. `fault(tier, use, why)` hears of calls that failed."""
        self._ranks, self._per_chunk, self._fault = ranks, units_per_chunk, fault
        self.unreadable: frozenset[int] = frozenset()
        """Tiers, by their places, that some rank leaves alone. Set by the scheduler's thread."""
        self._limit = anyio.Semaphore(LOOKUPS_MAX)
        super().__init__("kvpipe-finder", tiers)

    def ask(self, lookup: TierLookup) -> None:
        """Begin `lookup`. Never blocks; a lookup that cannot be made is `done` with nothing found."""
        self._begin(lookup)

    def stored(self, place: int, space: str, chunk: bytes, group: int) -> None:
        """Every rank has stored a chunk in the tier at `place`: it can be found at once."""
        guard = self.tiers[place]
        if isinstance(guard.tier, Listed):
            keys = (Key(space, chunk, group, rank, self._ranks) for rank in range(self._ranks))
            try:
                guard.tier.stored([guard.sealer.names(key)[0] for key in keys])
            except Exception as error:  # noqa: BLE001  (a bug of the tier's: what it does not list is a miss)
                self._fault(guard.name, FIND, repr(error))

    @property
    def usable(self) -> bool:
        """Whether any tier can be asked."""
        return self.alive and any(self._asks(place) for place in range(len(self.tiers)))

    def _asks(self, place: int) -> bool:
        return place not in self.unreadable and self.tiers[place].breakers[FIND].allows

    def stop(self, seconds_max: float = STOP_S_MAX) -> None:
        """End the thread, and close the tiers. Idempotent."""
        super().stop(seconds_max)

    # ---- the loop thread ------------------------------------------------------------------------------------------

    async def _work(self, lookup: TierLookup) -> None:
        try:
            with anyio.move_on_after(lookup.seconds_max * 2):  # what it waits for has limits of its own, before this
                async with self._limit:
                    await self._find(lookup, lookup.wanted)
                    await self._find(lookup, self._partial(lookup))
        except Exception as error:  # noqa: BLE001  (a bug of a tier's: other lookups go on)
            self._fault("", FIND, repr(error))
        finally:
            self._refuse(lookup)

    def _refuse(self, lookup: TierLookup) -> None:
        lookup.done = True
        self._ended += 1

    def _partial(self, lookup: TierLookup) -> tuple[Place, ...]:
        """Candidate ends of the partial chunk after each group's last full hit."""
        out: list[Place] = []
        for group in lookup.groups:
            missing = [units for g, units in lookup.wanted if g == group and (g, units) not in lookup.found]
            whole = len(lookup.keys) // self._per_chunk * self._per_chunk
            base = min(missing) - self._per_chunk if missing else whole
            stop = min(base + self._per_chunk, len(lookup.keys) + 1)
            out += [(group, units) for units in range(base + 1, stop)]
        return tuple(out)

    async def _find(self, lookup: TierLookup, places: tuple[Place, ...]) -> None:
        for index, tier in enumerate(self.tiers):
            left = [place for place in places if place not in lookup.found]
            if not left:
                return
            if not self._asks(index) or not await self._ready(tier, lookup):
                lookup.down = True
                continue
            count = max(1, KEYS_PER_CALL_MAX // (self._ranks * tier.sealer.ways))
            for first in range(0, len(left), count):
                part = left[first : first + count]
                there = await self._exists(tier, lookup, part)
                if there is None:
                    lookup.down = True
                    break
                lookup.found.update(dict.fromkeys(there, index))

    async def _ready(self, tier: GuardedTier, lookup: TierLookup) -> bool:
        """Wait a while for a tier that is still being opened: others are to be asked too."""
        left_s = lookup.deadline_s - time.monotonic()
        with anyio.move_on_after(left_s / 2) as waited:
            await tier.ready()
        if waited.cancelled_caught and left_s > 0:
            self._failed(tier, "it is still being opened")
        return not waited.cancelled_caught

    async def _exists(self, tier: GuardedTier, lookup: TierLookup, places: Sequence[Place]) -> list[Place] | None:
        """Return those of `places` that `tier` holds for every rank; None: it could not be asked."""
        left_s = lookup.deadline_s - time.monotonic()
        names = [
            tier.sealer.names(Key(lookup.space, chunk_name(lookup.keys[units - 1]), group, rank, self._ranks))
            for group, units in places
            for rank in range(self._ranks)
        ]
        if left_s <= 0:  # spent on others
            return None
        try:
            with anyio.fail_after(min(tier.timeout_s, left_s)):
                there = await tier.exists([name for some in names for name in some])
        except TimeoutError:  # the lookup's own limit is often the shorter: then it takes several to be sure
            self._failed(tier, "no answer in time", slow=left_s >= tier.timeout_s)
            return None
        except TierError as error:
            self._failed(tier, str(error))
            return None
        tier.breakers[FIND].ok()
        ways, ranks = tier.sealer.ways, self._ranks
        parts = [any(there[at : at + ways]) for at in range(0, len(there), ways)]
        return [place for i, place in enumerate(places) if all(parts[i * ranks : (i + 1) * ranks])]

    def _failed(self, tier: GuardedTier, why: str, *, slow: bool = False) -> None:
        self._fault(tier.name, FIND, why)
        tier.fault(FIND, why, slow=slow)


def chunk_name(key: bytes) -> bytes:
    """Return what a chunk is called in tiers: by its key, which is longer where it says more than the prefix."""
    return hashlib.sha256(key).digest() if len(key) > NAME_BYTES else key
