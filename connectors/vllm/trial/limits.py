"""Limits of a trial's requests, each in two forms: the client's parameters, and the limits that the checks use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple


class Allowed(NamedTuple):
    """The limits of one request: tokens that it may load and save, and indices of its tiers.

    A field that is None sets no limit.
    """

    load_tokens: int | None = None
    save_tokens: int | None = None
    tiers: frozenset[int] | None = None


LOCALITIES: Final = ("local", "remote")
"""The localities of a trial's tiers, in their order."""
LIMITS: Final[tuple[Callable[[int], tuple[dict[str, Any], Allowed]], ...]] = (
    lambda tokens: ({"max_load_tokens": tokens}, Allowed(load_tokens=tokens)),
    lambda tokens: ({"max_offload_tokens": tokens}, Allowed(save_tokens=tokens)),
    lambda _: ({"kv_load_tiers": [{"locality": "remote"}]}, Allowed(tiers=frozenset({1}))),
    lambda tokens: (
        {"max_load_tokens": 2 * tokens, "max_offload_tokens": tokens, "kv_load_tiers": []},
        Allowed(2 * tokens, tokens, frozenset()),
    ),
    lambda tokens: (
        {"max_load_tokens": -1 - tokens, "max_offload_tokens": True, "kv_load_tiers": [{"medium": 1}]},
        Allowed(),
    ),
)
"""Functions from a number of tokens to a request's parameters and the limits that these parameters set."""
