"""The prompts that clients have announced, and the times at which requests for these prompts are expected.

A resume hint announces that a later request will continue the prompt. Prefetching handles one prompt after the other.
A *turn* of a prompt fetches the prompt's chunks that memory has lost. The turn also refreshes the prompt's chunks in
memory, so that they are evicted later. The first turn is some time before the announced time. More turns follow,
because the request may come later than announced, and memory may have lost the chunks again by then.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

from kvpipe.cache.fair import FairShares
from kvpipe.cache.tenants import ANYBODY, AdapterIdentity, Tenant

if TYPE_CHECKING:
    from kvpipe.protocol.engine import Request
    from kvpipe.trace.log import Counters

ANNOUNCED_MAX: Final = 512
"""The largest number of announced prompts.

If there are more, the tenant with the most prompts loses the prompt with the latest announced time.
"""
HASHES_MAX: Final = 1 << 19
"""The largest number of block hashes of all prompts together.

If there are more, the tenant with the most hashes loses a prompt. A hash takes 75 bytes.
"""
HASHES_MAX_WITH_REQUESTS: Final = 1 << 16
"""The largest number of block hashes if the requests of prompts are kept, too, for routers.

This number is lower than `HASHES_MAX`, because the tokens of a block take ten times as much memory as its hash.
"""
TURNS: Final = (0.9, 1.5)
"""The times of a prompt's turns, as shares of the prompt's pause.

If the first turn came earlier, the prompt would take memory from prompts that are announced for an earlier time.
"""
LEAD_S_MIN: Final = 2.0
"""The shortest time from a prompt's first turn to its announced time, in seconds."""
BETWEEN_S_MIN: Final = 1.0
"""The shortest time between two turns of a prompt, in seconds."""
IDLE_S: Final = 120.0
"""Before an engine becomes idle, each prompt whose announced time is at most this many seconds away has its first turn.

The reason is that an idle engine makes no steps.
"""
_NEVER: Final = float("inf")


class KnownPrompt:
    """A prompt that does not belong to a request of the engine.

    Each of its block hashes is a whole key, which ends with the digest of the prompt's adapter.
    """

    request_id, lora_request = "", None
    num_computed_tokens = num_preemptions = 0
    skip_reading_prefix_cache = resumable = False

    def __init__(
        self, keys: Sequence[bytes], tokens: int, salt: str = "", adapter: AdapterIdentity | None = None
    ) -> None:
        """Create a prompt of `tokens` tokens.

        `keys` are the keys of the prompt's blocks. The keys also depend on `salt` and `adapter`.
        """
        self.block_hashes, self.cache_salt, self.adapter = keys, salt, adapter
        self.num_tokens = self.num_prompt_tokens = tokens


class Announcement:
    """A prompt of `tenant` that is announced for time `at_s`. The prompt's next turn is due at `due_s`.

    `turns` is the number of turns that the prompt has had. Routers are notified in the name of `request`. If `request`
    is None, no router is notified. In the hashes of every request that continues the prompt, the hash at index `place`
    is `key`.
    """

    __slots__ = ("asked", "at_s", "due_s", "key", "pause_s", "place", "request", "request_id", "tenant", "turns")

    def __init__(
        self, asked: KnownPrompt, request_id: str, request: Request | None, place: int, now_s: float, pause_s: float,
        tenant: Tenant = ANYBODY,
    ) -> None:  # fmt: skip
        """Announce that the prompt of request `request_id` will be continued `pause_s` seconds after `now_s`."""
        self.asked, self.request_id, self.request, self.tenant = asked, request_id, request, tenant
        self.place, self.key = place, asked.block_hashes[place]
        self.at_s, self.pause_s, self.turns = now_s + pause_s, pause_s, 0
        self.due_s = max(now_s, self.at_s - max(LEAD_S_MIN, pause_s * (1 - TURNS[0])))

    @property
    def waypoints(self) -> list[bytes]:
        """The prompt's hashes after n blocks, for each n that is `place + 1` with some lowest binary digits cleared."""
        size = self.place + 1
        return [
            self.asked.block_hashes[(size >> bit << bit) - 1] for bit in range(size.bit_length()) if size >> bit & 1
        ]

    def end_turn(self, now_s: float) -> bool:
        """Count the turn that begins now, and set the time of the next turn. Returns whether there is a next turn."""
        self.turns += 1
        if now_s >= self.due_s:  # an idle engine may take the turn early
            later = (self.at_s + self.pause_s * (share - 1) for share in TURNS[1:])
            self.due_s = next((due_s for due_s in later if due_s >= now_s + BETWEEN_S_MIN), _NEVER)
        return self.due_s < _NEVER


class _Times:
    """Keys of prompts, each with a time, sorted by these times."""

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
        """Return the keys whose time is at most `at_s`."""
        return [key for _, key in self._rows[: bisect_right(self._rows, at_s, key=lambda row: row[0])]]


class Announcements:
    """The announced prompts of one engine, by `Announcement.key`. All times are of the catalog's clock.

    The time of a call is logarithmic in the number of announced blocks, because `came` follows waypoints. No tenant
    takes entries or turns from a tenant that has announced less (`FairShares`).
    """

    def __init__(
        self, counters: Counters, *, hashes_max: int = HASHES_MAX, account: Callable[[Tenant], object] = lambda _: None
    ) -> None:
        """Start without prompts. `account` is explained in `FairShares`."""
        self.prompts: dict[bytes, Announcement] = {}
        self._counters, self._hashes_max = counters, hashes_max
        self._shares, self._hashes = FairShares[bytes](account), FairShares[bytes](account)
        self._waypoints = Counter[bytes]()
        # all prompts by `due_s`, and prompts before their first turn by `at_s`
        self._due, self._fresh = _Times(), _Times()

    @property
    def due_s(self) -> float:
        """The time of the earliest next turn of any prompt."""
        return self._due.first_s

    def add(self, one: Announcement) -> None:
        """Add an announcement. It replaces an earlier announcement of the same prompt."""
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
        """Forget and return the announced prompts with which `hashes` begins, the shortest prompt first."""
        found = sorted(self._beginnings(hashes, 0, len(hashes).bit_length()), key=lambda one: one.place)
        for one in found:
            self._forget(one.key, "came" if one.turns else "early")
        return found

    def _beginnings(self, hashes: Sequence[bytes], size: int, bits: int) -> Iterator[Announcement]:
        """Yield the announcements that continue the first `size` blocks of `hashes` by less than 2 ** `bits` blocks."""
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
        """Whether a prompt's turn is due. `idle` says that the engine has no other work."""
        return now_s >= self._due.first_s or (idle and now_s >= self._fresh.first_s - IDLE_S)

    def take(self, now_s: float, *, idle: bool) -> Announcement | None:
        """Return the announcement that has its turn now, or None if no turn is due.

        Tenants are served one after the other. The tenant's due prompt with the earliest announced time is taken.
        """
        due = self._due.until(now_s) + (self._fresh.until(now_s + IDLE_S) if idle else [])
        if not due:
            return None
        # Prompts whose announced time has passed are last, because their requests may never come.
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
        """Forget all prompts after a reset, because their chunks cannot be found any more."""
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
