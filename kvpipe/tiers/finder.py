"""Lookups in tiers, beside the scheduler's thread: which chunks of a prefix are there, on every rank."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence

import anyio

from kvpipe.tiers.base import Key, TierError
from kvpipe.tiers.keeper import Keeper
from kvpipe.tiers.shelf import FIND, Shelf

KEYS_PER_CALL_MAX = 4096
STOP_S_MAX = 5.0
LOOKUPS_MAX = 256
"""Lookups under way at once; more wait, at most until their deadline."""
NAME_BYTES = 32
"""Of a chunk's name, as of vLLM's hashes."""

Place = tuple[int, int]
"""A cache group, and the units of the prefix that a chunk ends at."""


class Lookup:
    """One question. The scheduler's thread makes it, and reads the answer once it is `done`."""

    __slots__ = (
        "deadline_s", "done", "down", "found", "groups", "keys", "space", "until_s", "wanted",
    )  # fmt: skip

    def __init__(
        self,
        keys: Sequence[bytes],
        wanted: tuple[Place, ...],
        *,
        groups: int,
        space: str,
        seconds_max: float,
    ) -> None:
        """`keys[u]`: hash of the first u + 1 units. `wanted`: whole chunks that are not in memory."""
        self.keys, self.wanted, self.groups, self.space = keys, wanted, groups, space
        self.deadline_s, self.until_s = seconds_max, time.monotonic() + seconds_max
        self.found: dict[Place, int] = {}
        """In which tier, by its place in the order, each place that was found is."""
        self.down = False  # a tier could not be asked
        self.done = False  # written last


class Finder:
    """One per scheduler's process."""

    def __init__(
        self, shelves: Sequence[Shelf], *, ranks: int, units_per_chunk: int, fault: Callable[[str, str, str], object]
    ) -> None:
        """Start the thread. `fault(tier, use, why)` hears of calls that failed."""
        self.shelves = tuple(shelves)
        self._ranks, self._per_chunk, self._fault = ranks, units_per_chunk, fault
        self.unreadable: frozenset[int] = frozenset()
        """Tiers, by their places, that some rank leaves alone. Set by the scheduler's thread."""
        self._asked = self._answered = 0
        self._limit = anyio.Semaphore(LOOKUPS_MAX)
        self._keeper = Keeper("kvpipe-finder", shelves)

    def ask(self, lookup: Lookup) -> None:
        """Begin `lookup`. Never blocks; a lookup that cannot be made is `done` with nothing found."""
        self._asked += 1
        self._keeper.begin(self._answer, lookup, self._end)

    @property
    def usable(self) -> bool:
        """Whether any tier can be asked."""
        return self._keeper.alive and any(self._asks(place) for place in range(len(self.shelves)))

    def _asks(self, place: int) -> bool:
        return place not in self.unreadable and self.shelves[place].breakers[FIND].allows

    def hurry(self) -> None:
        """Probe the tiers that are left alone, now."""
        self._keeper.hurry()

    @property
    def open(self) -> int:
        """Lookups that were asked and not answered."""
        return self._asked - self._answered

    def stop(self) -> None:
        """End the thread, and close the tiers. Idempotent."""
        self._keeper.stop(STOP_S_MAX)

    # ---- the loop thread ------------------------------------------------------------------------------------------

    async def _answer(self, lookup: Lookup) -> None:
        try:
            with anyio.move_on_after(lookup.deadline_s * 2):  # what it waits for has limits of its own, before this
                async with self._limit:
                    await self._find(lookup, lookup.wanted)
                    await self._find(lookup, self._partial(lookup))
        except Exception as error:  # noqa: BLE001  (a bug of a tier's: other lookups go on)
            self._fault("", FIND, repr(error))
        finally:
            self._end(lookup)

    def _end(self, lookup: Lookup) -> None:
        lookup.done = True
        self._answered += 1

    def _partial(self, lookup: Lookup) -> tuple[Place, ...]:
        """The places within the chunk that follows the last whole one that is found or held, of each group."""
        out: list[Place] = []
        for group in range(lookup.groups):
            missing = [units for g, units in lookup.wanted if g == group and (g, units) not in lookup.found]
            whole = len(lookup.keys) // self._per_chunk * self._per_chunk
            base = min(missing) - self._per_chunk if missing else whole
            stop = min(base + self._per_chunk, len(lookup.keys) + 1)
            out += [(group, units) for units in range(base + 1, stop)]
        return tuple(out)

    async def _find(self, lookup: Lookup, places: tuple[Place, ...]) -> None:
        for index, shelf in enumerate(self.shelves):
            left = [place for place in places if place not in lookup.found]
            if not left:
                return
            if not self._asks(index) or not await self._ready(shelf, lookup):
                lookup.down = True
                continue
            count = max(1, KEYS_PER_CALL_MAX // (self._ranks * shelf.sealer.ways))
            for first in range(0, len(left), count):
                part = left[first : first + count]
                there = await self._exists(shelf, lookup, part)
                if there is None:
                    lookup.down = True
                    break
                lookup.found.update(dict.fromkeys(there, index))

    async def _ready(self, shelf: Shelf, lookup: Lookup) -> bool:
        """Wait a while for a tier that is still being opened: others are to be asked too."""
        left_s = lookup.until_s - time.monotonic()
        with anyio.move_on_after(left_s / 2) as waited:
            await shelf.ready()
        if waited.cancelled_caught and left_s > 0:
            self._failed(shelf, "it is still being opened")
        return not waited.cancelled_caught

    async def _exists(self, shelf: Shelf, lookup: Lookup, places: Sequence[Place]) -> list[Place] | None:
        """Return those of `places` that `shelf` holds for every rank; None: it could not be asked."""
        left_s = lookup.until_s - time.monotonic()
        names = [
            shelf.sealer.names(Key(lookup.space, chunk_name(lookup.keys[units - 1]), group, rank, self._ranks))
            for group, units in places
            for rank in range(self._ranks)
        ]
        if left_s <= 0:  # spent on others
            return None
        try:
            with anyio.fail_after(min(shelf.timeout_s, left_s)):
                there = await shelf.tier.exists([name for some in names for name in some])
        except TimeoutError:  # the lookup's own limit is often the shorter: then it takes several to be sure
            self._failed(shelf, "no answer in time", slow=left_s >= shelf.timeout_s)
            return None
        except TierError as error:
            self._failed(shelf, str(error))
            return None
        shelf.breakers[FIND].ok()
        ways, ranks = shelf.sealer.ways, self._ranks
        parts = [any(there[at : at + ways]) for at in range(0, len(there), ways)]
        return [place for i, place in enumerate(places) if all(parts[i * ranks : (i + 1) * ranks])]

    def _failed(self, shelf: Shelf, why: str, *, slow: bool = False) -> None:
        self._fault(shelf.name, FIND, why)
        shelf.fault(FIND, why, slow=slow)


def chunk_name(key: bytes) -> bytes:
    """Return what a chunk is called in tiers: by its key, which is longer where it says more than the prefix."""
    return hashlib.sha256(key).digest() if len(key) > NAME_BYTES else key
