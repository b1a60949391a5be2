"""The limits of a request: how many tokens are loaded and saved, and which tiers are asked for the request's chunks."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

Medium = Literal["cpu", "storage"]
"""The kind of memory in which KV is kept. The pool is `cpu`. Every tier is `storage`, as in KV events."""
Locality = Literal["local", "remote"]
"""Whether a tier keeps values on the engine's host."""


class TierMatcher(NamedTuple):
    """Matches the tiers of one medium and one locality. None matches every medium, or every locality."""

    medium: Medium | None = None
    locality: Locality | None = None

    def matches(self, locality: Locality | Literal[""]) -> bool:
        """Whether this matcher matches a tier of `locality`. The unknown locality, "", always matches."""
        return self.medium != "cpu" and (not locality or self.locality in {None, locality})


class RequestLimits(NamedTuple):
    """The limits of one request. None means that there is no limit.

    Each load brings at most `load_tokens_max` tokens beyond the tokens that the engine's own cache holds. At most the
    first `save_tokens_max` tokens are saved. A tier is asked only if some matcher in `load_tiers` matches the tier.
    """

    load_tokens_max: int | None = None
    save_tokens_max: int | None = None
    load_tiers: frozenset[TierMatcher] | None = None

    def load_units_max(self, local_tokens: int, unit_tokens: int) -> int | None:
        """Return the largest number of units of the prefix that a hit may have, or None if there is no limit.

        The engine's own cache holds `local_tokens` tokens. A unit has `unit_tokens` tokens.
        """
        tokens = self.load_tokens_max
        return None if tokens is None else (local_tokens + tokens) // unit_tokens

    def save_units_max(self, unit_tokens: int) -> int | None:
        """Return how many units of `unit_tokens` tokens may be saved, or None if there is no limit."""
        tokens = self.save_tokens_max
        return None if tokens is None else tokens // unit_tokens

    def asks(self, locality: Locality | Literal[""]) -> bool:
        """Whether a tier of `locality` may be asked. The unknown locality is ""."""
        return self.load_tiers is None or any(one.matches(locality) for one in self.load_tiers)


NO_LIMITS: Final = RequestLimits()
