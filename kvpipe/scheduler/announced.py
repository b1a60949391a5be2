"""Which prompts come back, and when: of requests that ended with a resume hint. Prefetching takes them in turn.

In its turn a prompt gets back what memory has lost of it, and what is left is put behind what is evicted first. It has
its first turn some time before it is announced for; the others come as the hint may be wrong, and as memory may have
lost it again.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

from kvpipe.cache.fair import FairShares
from kvpipe.cache.tenants import ANYBODY, Tenant

if TYPE_CHECKING:
    from kvpipe.scheduler.base import Request
    from kvpipe.scheduler.prefetch import KnownPrompt
    from kvpipe.trace.log import Counters

ANNOUNCED_MAX: Final = 512
"""Prompts. If there are more, the tenant that has announced most loses the prompt that is to come last."""
HASHES_MAX: Final = 1 << 19
"""Hashes of all prompts together. If there are more, the tenant with most loses a prompt. A hash takes 75 bytes."""
HASHES_MAX_WITH_REQUESTS: Final = 1 << 16
"""The same where their requests are kept for routers: a block's tokens take ten times as much."""
TURNS: Final = (0.9, 1.5)
"""When a prompt has its turns, in shares of its pause. Earlier ones take room of others' that come before."""
LEAD_S_MIN: Final = 2.0
"""Before it is announced for: then it has its first turn at the latest."""
BETWEEN_S_MIN: Final = 1.0
"""From one turn to the next."""
IDLE_S: Final = 120.0
"""An engine that has nothing to do makes no steps: what comes within so long has its first turn before that."""
_NEVER: Final = float("inf")


class Announcement:
    """One prompt of `tenant` that is to come back at `at_s`; its next turn is due at `due_s`. `turns`: it has had.

    `request`: of whom routers are told, if anybody. `place`, `key`: all requests that come back have this hash there.
    """

    __slots__ = ("asked", "at_s", "due_s", "key", "pause_s", "place", "request", "request_id", "tenant", "turns")

    def __init__(
        self, asked: KnownPrompt, request_id: str, request: Request | None, place: int, now_s: float, pause_s: float,
        tenant: Tenant = ANYBODY,
    ) -> None:  # fmt: skip
        """The request `request_id` is over at `now_s`, and another is to come `pause_s` later."""
        self.asked, self.request_id, self.request, self.tenant = asked, request_id, request, tenant
        self.place, self.key = place, asked.block_hashes[place]
        self.at_s, self.pause_s, self.turns = now_s + pause_s, pause_s, 0
        self.due_s = max(now_s, self.at_s - max(LEAD_S_MIN, pause_s * (1 - TURNS[0])))

    @property
    def waypoints(self) -> list[bytes]:
        """Its hashes after so many blocks as `place + 1` is with one or more of its last binary digits cleared."""
        size = self.place + 1
        return [
            self.asked.block_hashes[(size >> bit << bit) - 1] for bit in range(size.bit_length()) if size >> bit & 1
        ]

    def end_turn(self, now_s: float) -> bool:
        """It has its turn now. Returns whether it will have another."""
        self.turns += 1
        if now_s >= self.due_s:  # else the engine had nothing to do
            later = (self.at_s + self.pause_s * (share - 1) for share in TURNS[1:])
            self.due_s = next((due_s for due_s in later if due_s >= now_s + BETWEEN_S_MIN), _NEVER)
        return self.due_s < _NEVER


class _Times:
    """Keys of prompts by a time of each, the earliest first."""

    def __init__(self) -> None:
        self._rows: list[tuple[float, bytes]] = []

    def add(self, at_s: float, key: bytes) -> None:
        insort(self._rows, (at_s, key))

    def remove(self, at_s: float, key: bytes) -> None:
        del self._rows[bisect_left(self._rows, (at_s, key))]

    @property
    def first_s(self) -> float:
        return self._rows[0][0] if self._rows else _NEVER

    def until(self, at_s: float) -> list[bytes]:
        """Return the keys up to a time, that included."""
        return [key for _, key in self._rows[: bisect_right(self._rows, at_s, key=lambda row: row[0])]]


class Announcements:
    """One per scheduler side; all times are of the catalog's clock. `prompts`: by the hash that they are known by.

    Whatever is announced, a call takes no more than some logarithms of it: `came` follows waypoints.
    No tenant takes places or turns from another that has announced less (`FairShares`).
    """

    def __init__(
        self, counters: Counters, *, hashes_max: int = HASHES_MAX, account: Callable[[Tenant], object] = lambda _: None
    ) -> None:
        """Nothing is announced. `account`: as for `FairShares`."""
        self.prompts: dict[bytes, Announcement] = {}
        self._counters, self._hashes_max = counters, hashes_max
        self._shares, self._hashes = FairShares[bytes](account), FairShares[bytes](account)
        self._waypoints = Counter[bytes]()
        self._due, self._fresh = _Times(), _Times()  # by `due_s`; by `at_s`, before any turn

    @property
    def due_s(self) -> float:
        """When the next turn is."""
        return self._due.first_s

    def add(self, one: Announcement) -> None:
        """Remember one, in place of another of the same prompt."""
        if one.key in self.prompts:
            self._forget(one.key, "replaced")
        self._counters["resumes_announced"] += 1
        self.prompts[one.key] = one
        self._shares.put(one.key, one.tenant, rank=one.at_s)
        self._hashes.put(one.key, one.tenant, rank=one.at_s, amount=len(one.asked.block_hashes))
        self._waypoints.update(one.waypoints)
        self._fresh.add(one.at_s, one.key)
        self._due.add(one.due_s, one.key)
        if self._shares.amount > ANNOUNCED_MAX:
            self._forget(self._shares.most(), "too_many")
        while self._hashes.amount > self._hashes_max:
            self._forget(self._hashes.most(), "too_many")

    def came(self, hashes: Sequence[bytes]) -> list[Announcement]:
        """Forget those with which a prompt with these hashes begins; return them, the shortest first."""
        found = sorted(self._beginnings(hashes, 0, len(hashes).bit_length()), key=lambda one: one.place)
        for one in found:
            self._forget(one.key, "came" if one.turns else "early")
        return found

    def _beginnings(self, hashes: Sequence[bytes], size: int, bits: int) -> Iterator[Announcement]:
        """Yield those that go on behind the waypoint after `size` blocks, for less than 2 ** `bits` blocks."""
        for bit in range(bits):
            stop = size + (1 << bit)
            if stop > len(hashes):
                return
            key = hashes[stop - 1]
            if key in self._waypoints:
                if key in self.prompts:
                    yield self.prompts[key]
                yield from self._beginnings(hashes, stop, bit)

    def has_turn(self, now_s: float, *, idle: bool) -> bool:
        """Whether a prompt's turn is due. `idle`: the engine has nothing else to do."""
        return now_s >= self._due.first_s or (idle and now_s >= self._fresh.first_s - IDLE_S)

    def take(self, now_s: float, *, idle: bool) -> Announcement | None:
        """Return the announcement that has its turn now, if a turn is due.

        Tenants have their turns one after the other. A tenant's due prompt that is to come first is taken.
        """
        due = self._due.until(now_s) + (self._fresh.until(now_s + IDLE_S) if idle else [])
        if not due:
            return None
        # a prompt that is late may never come
        one = min(
            (self.prompts[key] for key in due),
            key=lambda one: (self._shares.turn(one.key), one.at_s < now_s, one.at_s),
        )
        self._shares.serve(one.key)
        self._due.remove(one.due_s, one.key)
        if not one.turns:
            self._fresh.remove(one.at_s, one.key)
        more = one.end_turn(now_s)
        self._due.add(one.due_s, one.key)
        if not more:
            self._forget(one.key, "in_vain")
        return one

    def clear(self) -> None:
        """Forget all: nothing is found again of what was kept so far."""
        for key in [*self.prompts]:
            self._forget(key, "reset")

    def _forget(self, key: bytes, why: str) -> None:
        one = self.prompts.pop(key)
        self._shares.pop(key)
        self._hashes.pop(key)
        for waypoint in one.waypoints:
            self._waypoints[waypoint] -= 1
            if not self._waypoints[waypoint]:
                del self._waypoints[waypoint]
        self._due.remove(one.due_s, key)
        if not one.turns:
            self._fresh.remove(one.at_s, key)
        self._counters.count("resumes_over", why)
