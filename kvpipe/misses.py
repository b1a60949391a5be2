"""Why a prefix is not held: what the catalog remembers of the keys that it has lost, within bounds."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final, TypeVar

NOT_SAVED: Final = "not_saved"
BEING_SAVED: Final = "being_saved"
EVICTED: Final = "evicted"
RESET: Final = "reset"
TORN: Final = "torn"
SALT: Final = "salt"
BELOW_MINIMUM: Final = "below_minimum"
LOAD_FAILED: Final = "load_failed"
TIER_DOWN: Final = "tier_down"
TIER_LATE: Final = "tier_late"
TIER_LOST: Final = "tier_lost"
TIER_ASKED: Final = "tier_asked"
NO_ROOM: Final = "no_room"
BYPASS: Final = "bypass"
NO_CONSUMER: Final = "no_consumer"

REASONS: dict[str, str] = {
    NOT_SAVED: "nobody has saved it, or a chunk has grown beyond it, or it was forgotten long ago",
    BEING_SAVED: "it is being saved: not every rank has it yet",
    EVICTED: "it was held, and made room for others",
    RESET: "it was held before the cache was reset",
    TORN: "a rank failed to save it, so what others saved of it was dropped",
    SALT: "the same tokens were saved under another cache_salt, LoRA adapter or image",
    BELOW_MINIMUM: "what is left is shorter than the smallest unit that can be held, or vLLM has to compute it itself",
    LOAD_FAILED: "a load of this request failed; it computes",
    TIER_DOWN: "a tier cannot be used: nobody knows what it holds, or a rank has lost its memory",
    TIER_LATE: "a tier did not answer, or not bring it, in lookup_ms_max",
    TIER_LOST: "a tier held it at the lookup, but a rank could not bring it: gone, damaged, or the tier failed",
    TIER_ASKED: "a tier is asked for it, or is bringing it (told while the request waits)",
    NO_ROOM: "held, but others were loading and there were not blocks for all for too long",
    BYPASS: "kvpipe is bypassed",
    NO_CONSUMER: "this engine's kv_role does not load",
}
"""Why a lookup found less than the whole prompt, and what that means."""

KEYS_MAX = 1 << 16


class Lost:
    """Remembers the last `keys_max` keys that left the catalog, and under which key each first unit was saved."""

    def __init__(self, keys_max: int = KEYS_MAX) -> None:
        """Nothing was lost."""
        self._max = keys_max
        self.reasons: OrderedDict[tuple[int, bytes], str] = OrderedDict()  # by group and key; read by lookups
        self._firsts: OrderedDict[int, bytes] = OrderedDict()

    def add(self, group: int, key: bytes, why: str) -> None:
        """`key` cannot be found in `group` any more."""
        _remember(self.reasons, (group, key), why, self._max)

    def forget(self, group: int, key: bytes) -> None:
        """`key` can be found again."""
        self.reasons.pop((group, key), None)

    def why(self, group: int, key: bytes) -> str:
        """Return why `key` left, or that it never came."""
        return self.reasons.get((group, key), NOT_SAVED)

    def saved_first(self, tokens: Sequence[int], key: bytes) -> None:
        """The first unit of a prefix, of these `tokens`, is saved under `key`."""
        _remember(self._firsts, hash(tuple(tokens)), key, self._max)

    def has_twin(self, tokens: Sequence[int], key: bytes) -> bool:
        """Whether the same tokens were saved under another key: another salt, adapter or image."""
        return self._firsts.get(hash(tuple(tokens)), key) != key


_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


def _remember(table: OrderedDict[_Key, _Value], key: _Key, value: _Value, entries_max: int) -> None:
    """Note `value` as the youngest; forget the oldest beyond `entries_max`."""
    table.pop(key, None)
    table[key] = value
    if len(table) > entries_max:
        table.popitem(last=False)
