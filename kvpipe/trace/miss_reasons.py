"""The reasons of misses, and a bounded memory of the reasons why keys have left the catalog."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

NOT_SAVED: Final = "not_saved"
BEING_SAVED: Final = "being_saved"
EVICTED: Final = "evicted"
RESET: Final = "reset"
TORN: Final = "torn"
BELOW_MINIMUM: Final = "below_minimum"
LOAD_FAILED: Final = "load_failed"
TIER_DOWN: Final = "tier_down"
TIER_LATE: Final = "tier_late"
TIER_SLOW: Final = "tier_slow"
TIER_LOST: Final = "tier_lost"
TIER_ASKED: Final = "tier_asked"
ADAPTER: Final = "adapter"
NO_ROOM: Final = "no_room"
WEIGHTS: Final = "weights"
BYPASS: Final = "bypass"
NO_CONSUMER: Final = "no_consumer"
NOT_READ: Final = "not_read"
ELSEWHERE: Final = "elsewhere"
LIMIT: Final = "limit"

REASONS: dict[str, str] = {
    NOT_SAVED: "no request with the same cache_salt, LoRA adapter and images has saved the tokens, or a chunk "
    "has grown beyond them, or the chunk was forgotten long ago",
    BEING_SAVED: "the chunk is being saved: not every rank has it yet",
    EVICTED: "the chunk was evicted to make room for other chunks",
    RESET: "the chunk was dropped when the cache was reset",
    TORN: "a rank failed to save its part of the chunk, so the other ranks' parts were dropped",
    BELOW_MINIMUM: "the missing tokens are fewer than the smallest unit that can be held, or vLLM must compute "
    "these tokens, or computes them sooner than a load would bring them",
    LOAD_FAILED: "a load of this request failed, so the request is computed",
    TIER_DOWN: "a tier cannot be used: a lookup in it failed, or a rank has lost the memory for tiers",
    TIER_LATE: "a tier did not answer, or the chunk did not arrive, within lookup_ms_max or sooner than the "
    "engine would have computed the tokens",
    TIER_SLOW: "a tier has the chunk, but the engine computes the tokens sooner than the tier is read",
    TIER_LOST: "a tier held the chunk at the lookup, but a rank could not read the chunk: it was deleted or "
    "damaged, or the tier failed",
    TIER_ASKED: "a tier is being asked for the chunk, or the chunk is being fetched (reported while the request waits)",
    ADAPTER: "the bytes of the request's LoRA adapter are being read, or are not known, or not every rank holds "
    "the adapter yet (also reported while the request waits)",
    NO_ROOM: "there are too few blocks: other requests are loading, or a session keeps its blocks",
    WEIGHTS: "the ranks have not reported yet, or the weights may have changed and every rank reads its weights "
    "again (also reported while the request waits)",
    BYPASS: "kvpipe is bypassed",
    NO_CONSUMER: "this engine's kv_role does not load",
    ELSEWHERE: "another connector loads the whole prompt (`do_remote_prefill`), and kvpipe has only a part of "
    "the prompt in memory",
    LIMIT: "the request's `max_load_tokens` allows no more tokens",
    NOT_READ: "the request must not read the cache (`skip_reading_prefix_cache`: prompt_logprobs, or pooling "
    "of every token)",
}
"""The reasons why a lookup found less than the whole prompt, and the meaning of each reason.

A reason is about the request's own keys, and never depends on chunks that requests with other salts saved. Otherwise,
readers of the metrics would learn about the prompts of those requests (docs/security.md).
"""

KEYS_MAX = 1 << 16
PARTS = 64


class LostKeys:
    """A memory of the reasons why keys have left the catalog, for about the last `keys_max` keys.

    The keys are divided among several dicts by their hashes, because the growth of one large dict takes milliseconds.
    """

    def __init__(self, groups: int = 1, keys_max: int = KEYS_MAX) -> None:
        """Start empty, for `groups` cache groups."""
        parts = PARTS if keys_max >= groups * PARTS * PARTS else 1
        self.mask = parts - 1
        self._part_max = max(1, keys_max // groups // parts)
        self.reasons = tuple(tuple(OrderedDict[bytes, str]() for _ in range(parts)) for _ in range(groups))
        """The reasons by group, then by `hash(key) & mask`, then by key. Lookups read this attribute directly."""

    def add(self, group: int, key: bytes, why: str) -> None:
        """Record that `key` cannot be found in `group` any more, for the reason `why`."""
        part = self.reasons[group][hash(key) & self.mask]
        part.pop(key, None)  # so that `key` becomes the youngest entry
        part[key] = why
        if len(part) > self._part_max:
            part.popitem(last=False)

    def forget(self, group: int, key: bytes) -> None:
        """Record that `key` can be found in `group` again."""
        self.reasons[group][hash(key) & self.mask].pop(key, None)

    def why(self, group: int, key: bytes) -> str:
        """Return why `key` has left the catalog, or `NOT_SAVED` if no reason is recorded."""
        return self.reasons[group][hash(key) & self.mask].get(key, NOT_SAVED)
