"""The eviction policy of a region, in the holder: what engines report becomes the policy's calls.

The policy is one of the policies of private pools. In a private pool, a leased chunk is not in the policy. The holder
learns of a lease from the engine's next batch, or when a search for victims reads the lease. From then on the chunk is
*held* here, and not in the policy, until a later call finds the lease ended.
"""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Final

from kvpipe.cache.policy import Lru, make_policy
from kvpipe.cache.policy.base import AnsweredPolicy, Policy, RememberingPolicy, SessionPolicy, SizedPolicy
from kvpipe.cache.policy.batches import batches
from kvpipe.cache.policy.guard import RescuedPolicy, takes_hints
from kvpipe.cache.policy.hints import Action, Hint
from kvpipe.errors import ConfigError
from kvpipe.node.clients import NodeChunk, NodeClient
from kvpipe.node.layout import STAMP
from kvpipe.node.messages import Use
from kvpipe.node.rules import DEFAULT_POLICY

LOOK_MAX: Final = 64
"""The largest number of leased chunks that one search for victims skips, and of held chunks that it looks at."""
HELD_LOOK_MAX: Final = 1024
"""The largest number of held chunks that a search looks at, if it finds no other victims."""
USED: Final = frozenset({"leased", "loaded", "ended", "touched"})
"""The kinds of uses that are no hints."""
USE_BYTES_MAX: Final = 1 << 20
"""The largest size of the stamps of one use that comes in several batches."""


_log = logging.getLogger("kvpipe.node")


def evicting(name: str, slots: int) -> Policy:
    """Return the policy `name` for a region of `slots` slots. If it cannot be made, or fails later, LRU replaces it."""
    if name == DEFAULT_POLICY:
        return Lru(slots)  # without the registry, whose imports would delay a new holder
    try:
        return make_policy(name, slots, _failed)
    except (KeyError, ConfigError) as error:
        _failed("policy_failed", policy=name, why=error)
        return Lru(slots)


def _failed(event: str, *, policy: str, why: object) -> None:
    _log.warning("%s policy=%s: the least recently used chunk is evicted from now on (%s)", event, policy, why)


class Evictor:
    """Passes reports to the policy of one region, and chooses victims."""

    def __init__(
        self, policy: Policy, clock: Callable[[], float], by_use: Callable[[], list[NodeChunk]],
        is_leased: Callable[[int], bool],
    ) -> None:  # fmt: skip
        """Evict by `policy`, which has no chunks yet.

        `clock` returns seconds that never decrease. `by_use` returns all chunks, the least recently used first.
        `is_leased` returns whether a client leases a slot.
        """
        self._clock, self._by_use, self._is_leased = clock, by_use, is_leased
        self._held: OrderedDict[NodeChunk, None] = OrderedDict()  # the chunk that was looked at last is last
        self._going: set[NodeChunk] = set()  # chunks that the present call removes from the policy
        self.use(policy)

    def use(self, policy: Policy) -> None:
        """Evict by `policy` from now on. The policy has no chunks yet, so all chunks have to be published again."""
        self._held.clear()
        self._policy, self._batches = policy, batches(policy)
        self._request = policy.request if isinstance(policy, SessionPolicy) else None
        self._answered = policy.answered if isinstance(policy, AnsweredPolicy) else None
        self._dropped = policy.dropped if isinstance(policy, RememberingPolicy) else None
        if isinstance(policy, RescuedPolicy):
            policy.bind(self._evictable)

    def _evictable(self) -> list[NodeChunk]:
        return [chunk for chunk in self._by_use() if chunk not in self._held and chunk not in self._going]

    @property
    def takes_hints(self) -> bool:
        """Whether the policy takes hints now."""
        return takes_hints(self._policy)

    def sized(self, slots: int) -> None:
        """Tell the policy how many slots may be used."""
        if isinstance(self._policy, SizedPolicy):
            self._policy.sized(slots)

    def published(self, chunk: NodeChunk, *, over: bool) -> None:
        """Add a saved chunk. `over` says that the request that has saved the chunk had ended before the save."""
        self._notify(over=over)
        self._policy.insert(chunk, hit=False)

    def used(self, client: NodeClient, use: Use, chunks: Mapping[int, NodeChunk], generations: memoryview) -> list[int]:
        """Pass a use to the policy when all parts of the use have arrived. Returns the slots of the used chunks.

        `chunks` has the published chunks by slot.
        """
        stamps = client.begun + use.stamps
        client.begun = stamps if use.more and len(stamps) < USE_BYTES_MAX else b""
        if client.begun:
            return []
        named = chunks_of(stamps, chunks, generations)
        self._pass(use, named)
        return [chunk.slot for chunk in named] if use.kind in USED else []

    def _pass(self, use: Use, chunks: Sequence[NodeChunk]) -> None:
        now_s = self._notify(over=use.kind == "ended")
        if use.kind == "leased":
            self._hold(chunks)
        elif use.kind == "loaded":
            self._load(chunks)
        elif use.kind in USED:
            if use.answer is not None and self._answered is not None and use.kind == "ended":
                self._answered(use.answer)
            if self._held:
                self._release(chunks)
                chunks = [chunk for chunk in chunks if chunk not in self._held]
            self._batches.refresh_all(chunks)
        elif takes_hints(self._policy) and math.isfinite(use.in_s):
            hint = Hint(Action(use.kind), now_s + use.in_s)
            for chunk in chunks:
                self._policy.hint(chunk, hint)

    def same(self, chunk: NodeChunk) -> None:
        """Note that another engine has saved a chunk with the same key."""
        self._notify(over=False)
        if chunk not in self._held:
            self._policy.refresh(chunk)

    def _load(self, chunks: Sequence[NodeChunk]) -> None:
        self._hold(chunks)  # those that no search and no report has named before
        for chunk in chunks:
            del self._held[chunk]
        self._batches.insert_all(chunks, hit=True)

    def _hold(self, chunks: Sequence[NodeChunk]) -> None:
        """Remove leased chunks from the policy, until the lease has ended."""
        if new := [chunk for chunk in reversed(chunks) if chunk not in self._held]:
            self._batches.remove_all(new)
        self._held |= dict.fromkeys(chunks)

    def _release(self, chunks: Iterable[NodeChunk]) -> None:
        """Return those of `chunks` to the policy that are held and that no client leases any more."""
        ended = [chunk for chunk in chunks if chunk in self._held and not self._is_leased(chunk.slot)]
        for chunk in ended:
            del self._held[chunk]
        if ended:
            self._batches.insert_all(ended, hit=False)

    def _look(self, count: int) -> None:
        """Look whether leases of up to `count` held chunks have ended. Later calls look at the other held chunks."""
        some = [*islice(self._held, count)]
        for chunk in some:
            self._held.move_to_end(chunk)
        self._release(some)

    def victims(self, wanted: int) -> tuple[list[NodeChunk], list[NodeChunk]]:
        """Remove up to `wanted` chunks without a lease. Returns them, and the leased chunks that the search has met."""
        found, leased = list[NodeChunk](), list[NodeChunk]()
        self._look(LOOK_MAX)
        if len(self._policy) < wanted:
            self._look(HELD_LOOK_MAX)
        self._going.clear()
        while len(found) < wanted and len(leased) < LOOK_MAX and (chunk := self._policy.victim()) is not None:
            assert isinstance(chunk, NodeChunk)  # noqa: S101  (the policy has no other chunks)
            self._going.add(chunk)
            (leased if self._is_leased(chunk.slot) else found).append(chunk)
        if leased:
            self._notify(over=False)
        for chunk in reversed(leased):  # policies evict the end of a prefix first, and need its beginning first
            self._policy.insert(chunk, hit=False)
        self._hold(leased)
        return found, leased

    def forget(self, chunks: Sequence[NodeChunk]) -> None:
        """Remove chunks that are evicted for another reason than the policy's."""
        self._going = {*chunks}
        for chunk in chunks:
            self._held.pop(chunk, None)
            self._policy.remove(chunk)
            if self._dropped is not None:
                self._dropped(chunk)

    def _notify(self, *, over: bool) -> float:
        now_s = self._clock()
        if self._request is not None:
            self._request(now_s, over=over)
        return now_s


def chunks_of(stamps: bytes, chunks: Mapping[int, NodeChunk], generations: memoryview) -> list[NodeChunk]:
    """Return each published chunk that the joined `stamps` name, once. Stamps of other generations are ignored."""
    pairs = STAMP.iter_unpack(memoryview(stamps)[: len(stamps) // STAMP.size * STAMP.size])
    found = [chunks[slot] for slot, number in pairs if slot in chunks and generations[slot] == number]
    return [*dict.fromkeys(found)]
