"""Which prompts come back, and when: of requests that ended with a resume hint. Prefetching takes them in turn.

In its turn a prompt gets back what memory has lost of it, and what is left is put behind what is evicted first. It has
its first turn some time before it is announced for; the others come as the hint may be wrong, and as memory may have
lost it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from kvpipe.scheduler.base import Request
    from kvpipe.scheduler.prefetch import KnownPrompt
    from kvpipe.trace.log import Counters

ANNOUNCED_MAX: Final = 512
"""Prompts. If there are more, the one that is to come last is forgotten."""
HASHES_MAX: Final = 1 << 19
"""Of all prompts together, as for their number. One takes about 75 bytes."""
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
    """One prompt that is to come back at `at_s`; its next turn is due at `due_s`. `turns`: it has had.

    `request`: of whom routers are told, if anybody. `place`, `key`: all requests that come back have this hash there.
    """

    __slots__ = ("asked", "at_s", "due_s", "key", "pause_s", "place", "request", "request_id", "turns")

    def __init__(
        self, asked: KnownPrompt, request_id: str, request: Request | None, place: int, now_s: float, pause_s: float
    ) -> None:
        """The request `request_id` is over at `now_s`, and another is to come `pause_s` later."""
        self.asked, self.request_id, self.request = asked, request_id, request
        self.place, self.key = place, asked.block_hashes[place]
        self.at_s, self.pause_s, self.turns = now_s + pause_s, pause_s, 0
        self.due_s = max(now_s, self.at_s - max(LEAD_S_MIN, pause_s * (1 - TURNS[0])))

    def end_turn(self, now_s: float) -> bool:
        """It has its turn now. Returns whether it will have another."""
        self.turns += 1
        if now_s >= self.due_s:  # else the engine had nothing to do
            later = (self.at_s + self.pause_s * (share - 1) for share in TURNS[1:])
            self.due_s = next((due_s for due_s in later if due_s >= now_s + BETWEEN_S_MIN), _NEVER)
        return self.due_s < _NEVER


class Announcements:
    """One per scheduler side; all times are of the catalog's clock. `prompts`: by the hash that they are known by.

    `due_s`: when the next turn is.
    """

    def __init__(self, counters: Counters, *, hashes_max: int = HASHES_MAX) -> None:
        """Nothing is announced."""
        self.prompts: dict[bytes, Announcement] = {}
        self._counters, self._hashes, self._hashes_max = counters, 0, hashes_max
        self.due_s = self._first_s = _NEVER

    def add(self, one: Announcement) -> None:
        """Remember one, in place of another of the same prompt."""
        if one.key in self.prompts:
            self._forget(one.key, "replaced")
        self._counters["resumes_announced"] += 1
        self.prompts[one.key] = one
        self._hashes += len(one.asked.block_hashes)
        while len(self.prompts) > ANNOUNCED_MAX or self._hashes > self._hashes_max:
            self._forget(max(self.prompts.values(), key=lambda other: other.at_s).key, "too_many")
        self._plan()

    def came(self, hashes: Sequence[bytes]) -> list[Announcement]:
        """Forget those with which a prompt with these hashes begins; return them."""
        size = len(hashes)
        found = [one for one in self.prompts.values() if one.place < size and hashes[one.place] == one.key]
        for one in found:
            self._forget(one.key, "came" if one.turns else "early")
        if found:
            self._plan()
        return found

    def has_turn(self, now_s: float, *, idle: bool) -> bool:
        """Whether a prompt's turn is due. `idle`: the engine has nothing else to do."""
        return now_s >= self.due_s or (idle and now_s >= self._first_s - IDLE_S)

    def take(self, now_s: float, *, idle: bool) -> Announcement | None:
        """Return whose turn it is: of those whose turn is due the one that is to come first."""
        soon_s = now_s + IDLE_S if idle else -_NEVER
        due = [one for one in self.prompts.values() if one.due_s <= now_s or (not one.turns and one.at_s <= soon_s)]
        if not due:
            return None
        one = min(due, key=lambda one: (one.at_s < now_s, one.at_s))  # who is late may never come
        if not one.end_turn(now_s):
            self._forget(one.key, "in_vain")
        self._plan()
        return one

    def clear(self) -> None:
        """Forget all: nothing is found again of what was kept so far."""
        for key in [*self.prompts]:
            self._forget(key, "reset")
        self._plan()

    def _forget(self, key: bytes, why: str) -> None:
        self._hashes -= len(self.prompts.pop(key).asked.block_hashes)
        self._counters.count("resumes_over", why)

    def _plan(self) -> None:
        self.due_s = min((one.due_s for one in self.prompts.values()), default=_NEVER)
        self._first_s = min((one.at_s for one in self.prompts.values() if not one.turns), default=_NEVER)
