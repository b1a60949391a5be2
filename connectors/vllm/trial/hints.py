"""Hints of a trial's requests. Some hints are true, most are false, and some are malformed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

from kvpipe.connectors.vllm.hints import PARAMETER
from kvpipe.features.hints import ACTIONS_MAX

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.v1.request import Request

Hints = tuple[Any, Any]
"""A request's hints: the request's `KvHintsEnvelope`, and the value of kvpipe's own parameter."""


def _envelope(**payloads: dict[str, Any]) -> KvHintsEnvelope:
    actions = [KvHintAction(kind, f"kv.{kind}", "1.0", payload) for kind, payload in payloads.items()]
    return KvHintsEnvelope("1.0", "of a trial", actions)


HINTS: Final[tuple[Callable[[int], Hints], ...]] = (
    lambda seconds: (None, {"retain": {"ttl_seconds": seconds or 1e9}}),
    lambda seconds: (None, {"resume": {"after_seconds": seconds}}),
    lambda _: (None, {"demote": {}}),
    lambda seconds: (_envelope(retain={"ttl_seconds": 1 + seconds, "block_hashes": ["7"]}), None),
    lambda seconds: (_envelope(resume={"after_seconds": seconds}), {"retain": {}}),
    lambda _: (_envelope(evict={"execute_at": "request_completion", "include_current_request": True}), None),
    lambda seconds: (_envelope(retain={}, demote={}), {"resume": {"after_seconds": seconds}}),
    lambda seconds: (_envelope(fetch={"mode": "copy"}, resume={"after_seconds": -seconds - 1}), {"retain": None}),
    lambda _: ("kv.retain", ["retain"]),
    lambda seconds: (KvHintsEnvelope("9", "", [None] * (ACTIONS_MAX - 4 + seconds)), {"retain": {}}),  # type: ignore[list-item]
)
"""Each function returns the hints of a request. Its argument is the number of seconds that the hints name."""
RESUME: Final = 1
"""The index in `HINTS` of a well-formed `resume`."""


def set_hints(request: Request, hints: Hints) -> None:
    """Set the hints of a request."""
    request.kv_hints, own = hints
    request.kv_transfer_params = {PARAMETER: own} if own is not None else None
