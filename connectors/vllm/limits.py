"""The limits in `kv_transfer_params` of vLLM's requests, named as in vLLM's `OffloadingConnector`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final, get_args

from kvpipe.protocol.limits import NO_LIMITS, Locality, Medium, RequestLimits, TierMatcher

if TYPE_CHECKING:
    from vllm.v1.request import Request

LOAD_TOKENS: Final = "max_load_tokens"
SAVE_TOKENS: Final = "max_offload_tokens"
LOAD_TIERS: Final = "kv_load_tiers"
MATCHERS_MAX: Final = 64
"""The largest number of matchers in `kv_load_tiers`. A longer list is ignored as a whole."""
_MATCHERS: Final = {
    TierMatcher(medium, locality): (medium and medium.upper(), locality and locality.upper())
    for medium in (None, *get_args(Medium))
    for locality in (None, *get_args(Locality))
}
"""By matcher: the matcher's medium and locality in capital letters, as they are compared with a request's texts."""

Ignore = Callable[[str], object]


def limits_of(request: Request, ignore: Ignore) -> RequestLimits:
    """Return the request's limits.

    `ignore(name)` is called for each invalid value. An invalid value sets no limit.
    """
    parameters: object = request.kv_transfer_params
    if not isinstance(parameters, Mapping) or not parameters.keys() & {LOAD_TOKENS, SAVE_TOKENS, LOAD_TIERS}:
        return NO_LIMITS
    load, save = (_tokens(name, parameters.get(name), ignore) for name in (LOAD_TOKENS, SAVE_TOKENS))
    return RequestLimits(load, save, _matchers(parameters.get(LOAD_TIERS), ignore))


def _tokens(name: str, value: object, ignore: Ignore) -> int | None:
    """Return a limit in tokens. As in vLLM, a bool and a float are invalid."""
    if type(value) is int and value >= 0:
        return value
    if value is not None:
        ignore(name)
    return None


def _matchers(value: object, ignore: Ignore) -> frozenset[TierMatcher] | None:
    """Return the matchers of a list. As in vLLM, a list that contains only invalid matchers sets no limit."""
    if value is None:
        return None
    if not isinstance(value, list) or len(value) > MATCHERS_MAX:
        ignore(LOAD_TIERS)
        return None
    matchers = [one for one in map(_matcher, value) if one is not None]
    for _ in range(len(value) - len(matchers)):
        ignore(LOAD_TIERS)
    return frozenset(matchers) if matchers or not value else None


def _matcher(value: object) -> TierMatcher | None:
    """Return the matcher, or None if `value` is invalid. As in vLLM, unknown keys are ignored."""
    if not isinstance(value, dict):
        return None
    wanted = tuple(one.upper() if isinstance(one, str) else one for one in map(value.get, TierMatcher._fields))
    return next((one for one, texts in _MATCHERS.items() if texts == wanted), None)
