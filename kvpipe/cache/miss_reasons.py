"""Reasons of misses, and a bounded memory of why keys have left the catalog."""

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

REASONS: dict[str, str] = {
    NOT_SAVED: "nobody with its cache_salt, LoRA adapter and images has saved it, or a chunk has grown beyond it, "
    "or it was forgotten long ago",
    BEING_SAVED: "it is being saved: not every rank has it yet",
    EVICTED: "it was held, and made room for others",
    RESET: "it was held before the cache was reset",
    TORN: "a rank failed to save it, so what others saved of it was dropped",
    BELOW_MINIMUM: "what is left is shorter than the smallest unit that can be held, or vLLM has to compute it itself, "
    "or does so sooner than it would wait for it",
    LOAD_FAILED: "a load of this request failed; it computes",
    TIER_DOWN: "a tier cannot be used: nobody knows what it holds, or a rank has lost its memory",
    TIER_LATE: "a tier did not answer, or not bring it, in lookup_ms_max, nor sooner than it is computed",
    TIER_SLOW: "a tier has it, but the engine computes it sooner than it is read",
    TIER_LOST: "a tier held it at the lookup, but a rank could not bring it: gone, damaged, or the tier failed",
    TIER_ASKED: "a tier is asked for it, or is bringing it (reported while the request waits)",
    ADAPTER: "the bytes of its LoRA adapter are being read, or not known, or not every rank holds them yet "
    "(reported while the request waits, too)",
    NO_ROOM: "held, but others were loading, or a session keeps its blocks, and there are not enough for all",
    WEIGHTS: "the ranks have not reported yet, or the weights may have changed and every rank reads its own again "
    "(reported while the request waits, too)",
    BYPASS: "kvpipe is bypassed",
    NO_CONSUMER: "this engine's kv_role does not load",
    ELSEWHERE: "another connector brings the whole prompt (`do_remote_prefill`), and kvpipe has only a part of it in "
    "memory",
    NOT_READ: "the request wants no cache read (`skip_reading_prefix_cache`: prompt_logprobs, pooling of every token)",
}
"""Why a lookup found less than the whole prompt, and what that means.

A reason is about the request's own keys. None may depend on what was saved of other salts: whoever reads the metrics
would learn what others ask (docs/security.md).
"""

KEYS_MAX = 1 << 16
PARTS = 64


class Lost:
    """Remembers why the last keys, about `keys_max`, have left the catalog.

    It is divided into parts by the keys' hashes, because one large dict takes milliseconds when it grows.
    """

    def __init__(self, groups: int = 1, keys_max: int = KEYS_MAX) -> None:
        """Start empty, for `groups` cache groups."""
        parts = PARTS if keys_max >= groups * PARTS * PARTS else 1
        self.mask = parts - 1
        self._part_max = max(1, keys_max // groups // parts)
        self.reasons = tuple(tuple(OrderedDict[bytes, str]() for _ in range(parts)) for _ in range(groups))
        """By group, then by `hash(key) & mask`, then by key: the reason. Lookups read it directly."""

    def add(self, group: int, key: bytes, why: str) -> None:
        """Note that `key` cannot be found in `group` any more, for the reason `why`."""
        part = self.reasons[group][hash(key) & self.mask]
        part.pop(key, None)  # it becomes the youngest
        part[key] = why
        if len(part) > self._part_max:
            part.popitem(last=False)

    def forget(self, group: int, key: bytes) -> None:
        """Note that `key` can be found in `group` again."""
        self.reasons[group][hash(key) & self.mask].pop(key, None)

    def why(self, group: int, key: bytes) -> str:
        """Return why `key` has left, or `NOT_SAVED` if nothing is known of it."""
        return self.reasons[group][hash(key) & self.mask].get(key, NOT_SAVED)
